"""``prefed peer FILE``: one peer. ``torchrun --nproc-per-node=5 -m prefed peer FILE`` starts five."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from prefed.ui.cli.arguments import CellName, File, Overrides, run_name
from prefed.ui.cli.errors import INTERRUPTED, exit_code

GRACE = 30.0
"""Seconds from a signal to the end of the process at the latest."""


def peer(
    file: File,
    overrides: Overrides = None,
    client: Annotated[
        str | None,
        typer.Option(
            help="Whose pairs this peer has; left out: those of the client in the place of its rank."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where all meet: peer 0's machine. Left out: as torchrun says."
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Which peer this is, 0 for the first.")] = None,
    peers: Annotated[int | None, typer.Option(help="How many peers there are.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the peers' run directories; left out: runs/FILE-METHOD-seedSEED."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume",
            help="Continue after the last round that all peers have, or start where there is none.",
        ),
    ] = False,
    patience: Annotated[
        float, typer.Option(min=1.0, help="Seconds without a sign of life after which a peer is given up.")
    ] = 30.0,
    join: Annotated[float, typer.Option(min=1.0, help="Seconds to wait until all peers have come.")] = 600.0,
    backend: Annotated[
        Literal["gloo", "nccl"], typer.Option(help="What carries models; nccl: each peer has its own GPU.")
    ] = "gloo",
    cell: CellName = None,
) -> None:
    """Run one client of an experiment without a server, together with its peers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    # A peer that is gone is named in one line: the library's traces say no more.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        from prefed.config.table import load_cell

        experiment = load_cell(file, cell, overrides or [])
        from dataclasses import replace

        from prefed.models.notices import silence_transformers
        from prefed.networks.peers.rendezvous import Place
        from prefed.networks.peers.run import peer_folder, run_peer
        from prefed.runs.run import default_out
        from prefed.trackers.terminal import Terminal

        silence_transformers()
        place = replace(Place.of(os.environ, at, rank, peers), patience=patience, join=join, backend=backend)
        folder, label = out or default_out(experiment, run_name(file, cell)), f"peer {place.rank}"
        callbacks = [Terminal(label=label)]
        summary = run_peer(experiment, folder, place, client=client, resume=resume, callbacks=callbacks)
    except KeyboardInterrupt as interrupt:
        typer.echo("stopped; whole rounds are kept: start all peers again with --auto-resume", err=True)
        raise typer.Exit(interrupt.args[0] if interrupt.args else INTERRUPTED) from None
    accuracy = summary["preference_accuracy"]["mean"]
    typer.echo(
        f"{label}: {summary['peer']}: preference accuracy {accuracy:.3f} → {peer_folder(folder, place.rank)}"
    )


def stop(number: int, frame: object) -> NoReturn:
    """End in good order at a signal: the others are notified. The process ends even if that fails."""
    # A second signal while peers are notified must not cut that short.
    signal.signal(number, signal.SIG_IGN)
    fuse = threading.Timer(GRACE, os._exit, [exit_code(number)])
    fuse.daemon = True
    fuse.start()
    raise KeyboardInterrupt(exit_code(number))


def ends_at_once(command: Callable[..., None]) -> Callable[..., NoReturn]:
    """``command``, which ends the process: a thread that waits for a lost peer cannot be joined."""

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
