"""``prefed federation``, ``federate``, ``site`` and ``peer``: runs across machines."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from prefed.ui.cli.arguments import (
    AutoResume,
    CellName,
    Fields,
    File,
    Merge,
    Overrides,
    Resume,
    RunOut,
    given_words,
    run_name,
)
from prefed.ui.cli.errors_and_interrupts import INTERRUPTED, UsageError, exit_code, interruptible
from prefed.ui.cli.log import report
from prefed.ui.cli.output import print_progress, progress_console, terminal

if TYPE_CHECKING:
    from prefed.networks.federation.config import SiteConfig


def federation(
    action: Annotated[str, typer.Argument(metavar="init", help="What to do: init.", show_default=False)],
    project: Annotated[Path, typer.Argument(help="The project file (TOML).", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="The folder of the kits (default: the federation's name).")
    ] = None,
) -> None:
    """Create the kits of a federation: certificates, keys and settings of the hub and its sites.

    Run it again after adding sites to the project file: it creates their kits and keeps existing ones.
    """
    if action != "init":
        raise UsageError(f"prefed federation {action}: use `prefed federation init PROJECT`")
    from prefed.networks.federation.flare import check_installed

    check_installed()
    from prefed.config import ConfigError
    from prefed.networks.federation.flare.kits import Project, make_kits

    described = Project.load(project)
    folder = out or Path(described.name)
    try:
        make_kits(described, folder)
    except ConfigError as error:
        raise ConfigError(f"{project}: {error}") from None
    typer.echo(f"hub: {folder / 'hub'}; next: `prefed federate EXPERIMENT --hub {folder / 'hub'}`")
    for name in described.sites:
        typer.echo(
            f"{name}: {folder / name}, for this site only; next: complete site.toml, then `prefed site`"
        )
    typer.echo(f"{folder / 'authority'}: signs the certificates of new sites; keep it offline and secret")


def federate(
    context: typer.Context,
    file: File,
    overrides: Overrides = None,
    hub: Annotated[Path, typer.Option(help="The hub's folder, from `prefed federation init`.")] = Path("hub"),
    out: RunOut = None,
    resume: Resume = False,
    auto_resume: AutoResume = False,
    sites: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="The sites that take part (default: all that have kits)."),
    ] = None,
    *,
    terms: Annotated[
        dict[str, Any],
        Fields("networks.federation.config:Terms", "wait at_least visit most_clients most_pairs"),
    ],
    cell: CellName = None,
) -> None:
    """Run an experiment over the sites of a federation."""
    words = ["prefed", "federate", str(file), *given_words(context, without=("out", "resume", "auto_resume"))]
    again = "--auto-resume" if auto_resume else "--resume"
    with interruptible(words, out, resume or auto_resume, again=(again,)) as paths:
        from prefed.networks.federation.flare import check_installed

        check_installed()
        from prefed.networks.federation.experiment import load_federated

        experiment = load_federated(file, cell, overrides or [])
        from prefed.core.text import pluralize
        from prefed.networks.federation.config import Terms
        from prefed.networks.federation.federate import federate as federate_experiment
        from prefed.networks.federation.flare.kits import Kits
        from prefed.networks.federation.flare.transport import FlareTransport
        from prefed.runs.run import default_out
        from prefed.store.directory import holds_run, refuse_foreign
        from prefed.ui.pages.page import public_page
        from prefed.ui.pages.terminal import print_result, result_line

        console, kits = progress_console(), Kits.open(hub)
        path = out or default_out(experiment, run_name(file, cell))
        paths.append(path)
        resume = holds_run(path) if auto_resume else resume
        refuse_foreign(path, resume)
        chosen = tuple(sites.split(",")) if sites else kits.sites
        if strangers := sorted(set(chosen) - set(kits.sites)):
            raise ValueError(f"--sites: {strangers[0]!r} has no kit (sites: {', '.join(kits.sites)})")
        rounds = pluralize(experiment.rounds, "round", "rounds")
        counted = pluralize(len(chosen), "site", "sites")
        console.print(f"{experiment.method.name}, {rounds}, {counted} → {path}", markup=False)
        with FlareTransport(kits) as transport:
            summary = federate_experiment(
                experiment,
                path,
                transport,
                Terms(kits.federation, chosen, **terms),
                resume=resume,
                callbacks=terminal(console),
                page=public_page,
                report=print_progress,
            )
        print_result(summary, console)
        console.print(f"report: prefed report {shlex.quote(str(path))}", markup=False, soft_wrap=True)
        if console.quiet:
            typer.echo(f"{result_line(summary)} → {path}")


def site(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[status|keys|export|log|approve|withdraw] CONFIG [DIGEST|CLIENT]",
            help="The site's file, site.toml; with approve: and a SHA-256; with withdraw: and a client.",
            show_default=False,
        ),
    ],
    last: Annotated[int, typer.Option(min=0, help="With status: number of log entries to show.")] = 20,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="With status: print metrics in the format of Prometheus.")
    ] = False,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="With export: the beginning of the run's name (default: the run that ended last).",
        ),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="With export: the client whose model to export (default: the site's only client).",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="With export: the folder to write.")] = None,
    merge: Merge = False,
    force: Annotated[
        bool, typer.Option("--force", help="With export: replace the folder if it is an earlier export.")
    ] = False,
    evidence: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="With log: write the log and its check to a new file."),
    ] = None,
    known: Annotated[
        str | None,
        typer.Option(
            metavar="SHA256", help="With log: a line that the log must have, from an earlier check."
        ),
    ] = None,
    by: Annotated[str | None, typer.Option(help="With approve and withdraw: who decided.")] = None,
    reason: Annotated[str | None, typer.Option(help="With approve and withdraw: why.")] = None,
    until: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], help="With approve: the last day on which it counts (UTC)."),
    ] = None,
    everybody: Annotated[bool, typer.Option("--all", help="With withdraw: all clients.")] = False,
) -> None:
    """Take part in a federation until stopped.

    With status: show the log of requests to the site and its replies. With keys: make the site's key for
    secure sums if it has none, and show its fingerprint and those of the other sites. With export: write the
    final model of one of the site's clients to a folder that PEFT or transformers loads. With log: check that
    no line of the site's log was altered, removed or moved. With approve: allow a run or a version of code.
    With withdraw: take part without a client from now on, and delete what the site's state has of it.
    """
    counts = {"status": 2, "keys": 2, "export": 2, "log": 2, "approve": 3, "withdraw": 2 if everybody else 3}
    word = words[0] if counts.get(words[0]) == len(words) else ""
    path = Path(words[1] if word else words[0])
    if len(words) > 1 and not word:
        raise UsageError(
            "use `prefed site CONFIG`, `prefed site status`, `keys`, `export` or `log` with CONFIG, `prefed "
            "site approve CONFIG DIGEST`, or `prefed site withdraw CONFIG CLIENT` (or --all)"
        )
    decides = word in ("approve", "withdraw")
    if decides and not (by and reason):
        raise UsageError(f"prefed site {word} requires --by NAME and --reason TEXT, which the log keeps")
    options = {"--run": run, "--client": client, "--out": out, "--merge": merge, "--force": force}
    for of, wrong in (
        ("log", {"--export": evidence, "--known": known} if word != "log" else {}),
        ("approve", {"--until": until} if word != "approve" else {}),
        ("withdraw", {"--all": everybody} if word != "withdraw" else {}),
        ("approve` or `prefed site withdraw", {} if decides else {"--by": by, "--reason": reason}),
        ("export CONFIG", options if word != "export" else {}),
        ("status CONFIG", {"--prometheus": prometheus} if word != "status" else {}),
    ):
        if given := [name for name, value in wrong.items() if value]:
            raise UsageError(f"{given[0]} requires `prefed site {of}`")
    if word == "export" and out is None:
        raise UsageError("prefed site export requires --out DIR, the folder for the model")
    from prefed.networks.federation.config import SiteConfig

    config = SiteConfig.load(path)
    if out is not None:
        from prefed.networks.federation.final_models import export_client
        from prefed.ui.cli.models import check_folder

        check_folder(
            out, {"site's state": Path(config.state), "base model": Path(config.model.name)}, replace=force
        )
        exported = export_client(config, out, run=run or "", client=client, merge=merge)
        typer.echo(exported.describe(out))
        return
    if word == "status":
        from prefed.networks.federation.audit_log import prometheus_lines, status_lines

        for line in prometheus_lines(config) if prometheus else status_lines(config, last):
            typer.echo(line)
        return
    if word == "log":
        _check_log(config, evidence, known)
        return
    if decides:
        assert by is not None
        assert reason is not None
        from prefed.core.text import printable
        from prefed.networks.federation.approvals_withdrawals import ALL, approve, withdraw

        if word == "approve":
            entry = approve(config, words[2], by, reason, until.date() if until else None)
        else:
            client = ALL if everybody else words[2]
            deleted, entry = withdraw(config, client, by, reason)
            typer.echo("\n".join(f"deleted {printable(each)}" for each in deleted) or "nothing to delete")
            typer.echo(
                "Start the site again; the hub then runs `prefed forget RUN --client NAME --yes --hub HUB`."
            )
        typer.echo(f"logged as {entry}")
        return
    if word == "keys":
        from prefed.privacy.secure import Identity, fingerprint

        typer.echo(f"{config.name} = {fingerprint(Identity.at(config.identity, create=True).public)}")
        for name, words_of in config.sites.items():
            typer.echo(f"  expects {name} = {words_of}")
        typer.echo("Compare each fingerprint with its site by telephone, and put it in [sites] of site.toml.")
        return
    from prefed.networks.federation.flare import check_installed

    check_installed()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        from prefed.networks.federation.flare.site import take_part

        take_part(config, print_progress)
    except KeyboardInterrupt:
        report("stopped", "stopped; private states were kept", "error", code=INTERRUPTED)
        raise typer.Exit(INTERRUPTED) from None


def _check_log(config: SiteConfig, out: Path | None, known: str | None) -> None:
    """Check the site's log, and write it with its check to a new file."""
    from prefed.config import ConfigError
    from prefed.core.text import pluralize
    from prefed.networks.federation.audit_log import SentLog, check_chain, evidence

    chain = check_chain(SentLog.of(config), known)
    if out is not None:
        out.touch(0o600, exist_ok=False)
        out.write_text(json.dumps(evidence(config, chain), indent=1) + "\n")
    typer.echo(f"{pluralize(chain.lines, 'line', 'lines')}; the last has SHA-256 {chain.head}")
    if chain.older:
        older = pluralize(chain.older, "line", "lines")
        typer.echo(f"{older} of an earlier version without hashes; checked from {chain.start or 'the next'}")
    for place in chain.cut:
        typer.echo(f"{place}: cut off while it was written")
    if chain.faults:
        raise ConfigError("\n".join(chain.faults))


def _stop(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


GRACE = 30.0
"""Maximum number of seconds from a signal to the end of the process."""


def peer(
    file: File,
    overrides: Overrides = None,
    client: Annotated[
        str | None,
        typer.Option(
            help="The client whose pairs this peer holds (default: the client at the index of its rank)."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="The address of peer 0, to which all connect (default: from torchrun)."
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="The index of this peer, from 0.")] = None,
    peers: Annotated[int | None, typer.Option(help="The number of peers.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the peers' run directories (default: runs/FILE-METHOD-seedSEED)."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume",
            help="Continue after the last round that all peers have, or start if there is none.",
        ),
    ] = False,
    patience: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds without a heartbeat after which a peer is considered lost."),
    ] = 30.0,
    join: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for all peers to connect.")] = 600.0,
    backend: Annotated[
        Literal["gloo", "nccl"],
        typer.Option(help="The backend that transfers models; nccl needs a GPU for each peer."),
    ] = "gloo",
    cell: CellName = None,
) -> None:
    """Run one client of an experiment without a server, together with its peers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    # prefed reports a lost peer in one line; PyTorch's traces add nothing.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        from prefed.config.experiment_table import load_cell

        experiment = load_cell(file, cell, overrides or [])
        from dataclasses import replace

        from prefed.networks.peers.rendezvous import Place
        from prefed.networks.peers.run import peer_folder, run_peer
        from prefed.runs.run import default_out

        place = replace(Place.of(os.environ, at, rank, peers), patience=patience, join=join, backend=backend)
        folder, label = out or default_out(experiment, run_name(file, cell)), f"peer {place.rank}"
        callbacks = terminal(progress_console(), label)
        summary = run_peer(experiment, folder, place, client=client, resume=resume, callbacks=callbacks)
    except KeyboardInterrupt as interrupt:
        code = interrupt.args[0] if interrupt.args else INTERRUPTED
        text = "stopped; complete rounds are kept: restart all peers with --auto-resume"
        report("stopped", text, "error", code=code)
        raise typer.Exit(code) from None
    from prefed.ui.pages.text_health import text_line

    words = [f"preference accuracy {summary['preference_accuracy']['mean']:.3f}"]
    words += [line] if "text" in summary and (line := text_line(summary["text"])) else []
    path = peer_folder(folder, place.rank)
    typer.echo(f"{label}: {summary['peer']}: {'; '.join(words)} → {path}")


def stop(number: int, frame: object) -> NoReturn:
    """Signal handler: interrupt the peer, and end the process after :data:`GRACE` seconds at most."""
    # A second signal must not interrupt the notification of the other peers.
    signal.signal(number, signal.SIG_IGN)
    fuse = threading.Timer(GRACE, os._exit, [exit_code(number)])
    fuse.daemon = True
    fuse.start()
    raise KeyboardInterrupt(exit_code(number))


def ends_at_once(command: Callable[..., None]) -> Callable[..., NoReturn]:
    """Wrap a command to end the process, because a thread waiting for a lost peer cannot be joined."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> NoReturn:
        code = 0
        try:
            command(*args, **kwargs)
        except typer.Exit as end:
            code = end.exit_code
        except BaseException:
            traceback.print_exc()
            code = 1
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            code = code or 1
        os._exit(code)

    return run
