"""What the hub published to a site's clients after a run's last round, and their models made of it.

With a client's private state it makes the client's own model, for ``prefed site export``. An index says for
each client which message it is, and which version of its private state belongs to it. Messages are written
before the index names them, so that a process that is killed in between leaves what there was. Reading needs
no lock.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefed.config import Experiment
from prefed.core import files
from prefed.core.text import listed
from prefed.core.wire import decode_download, decode_state
from prefed.data import FederatedDataset
from prefed.data.dataset import CLIENTS, read_manifest
from prefed.models.quiet_libraries import silence_transformers
from prefed.networks.federation.config import SiteConfig
from prefed.networks.federation.experiment import begun_experiment, member_dataset
from prefed.networks.federation.limits import RefusalError
from prefed.networks.federation.messages import Publish, check_download
from prefed.networks.federation.vault import Vault, site_secret
from prefed.runs.build import assemble_job, build_data, build_trainers
from prefed.runs.export import Export, write_tensors
from prefed.runs.loaded_run import no_client
from prefed.runs.record import RunError
from prefed.store import StoreError

_INDEX = "clients.json"


@dataclass(frozen=True)
class Parting:
    """What a client was given at the end.

    Attributes:
        round: the last one.
        receipt: of the private state that counts; ``None`` for the client's first.
        model: the fingerprint of the base model.
        file: the name of the message's file.
    """

    round: int
    receipt: str | None
    model: str
    file: str


class Published:
    """What the clients of one run were given.

    Args:
        folder: of the run, at the site.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "published"

    def keep(self, number: int, receipts: Mapping[str, str | None], model: str, message: bytes) -> None:
        """Keep ``message`` for these clients, instead of what each of them had.

        Raises:
            WriteError: it cannot be written. What there was stays.
        """
        files.private_folder(self._folder)
        name = f"{number:06d}-{files.digest(message)}.safetensors"
        files.write(self._folder / name, message, mode=0o600)
        entries = {client: asdict(known) for client, known in self.clients().items()}
        entries |= {client: asdict(Parting(number, own, model, name)) for client, own in receipts.items()}
        index = {"time": datetime.now(UTC).isoformat(timespec="microseconds"), "clients": entries}
        files.write(self._folder / _INDEX, files.dumps_with_digest(index), mode=0o600)
        named = {_INDEX, *(entry["file"] for entry in entries.values())}
        for path in self._folder.iterdir():
            if path.name not in named:
                files.remove(path)

    @property
    def time(self) -> str:
        """When the last message came, as ISO 8601 in UTC; empty if none has."""
        return str(self._index().get("time", ""))

    def clients(self) -> dict[str, Parting]:
        """Client, by the name that the hub knows it by → what it was given.

        Raises:
            StoreError: the index is damaged.
        """
        return {client: Parting(**entry) for client, entry in self._index().get("clients", {}).items()}

    def read(self, client: str) -> tuple[Parting, bytes]:
        """What a client was given, and the message itself.

        Raises:
            KeyError: it was given nothing.
            StoreError: the message is missing or damaged.
        """
        while True:
            given = self.clients()[client]
            path = self._folder / given.file
            try:
                message = path.read_bytes()
            except FileNotFoundError:
                # A later message may have taken its place in the meantime.
                if self.clients()[client] == given:
                    raise StoreError(f"{path} is missing: have the hub send it again (--resume)") from None
                continue
            if files.digest(message) not in given.file:
                raise StoreError(f"{path} is damaged: have the hub send it again (--resume)")
            return given, message

    def _index(self) -> dict[str, Any]:
        path = self._folder / _INDEX
        try:
            return files.loads_with_digest(path.read_bytes()) if path.exists() else {}
        except files.DamagedError as error:
            raise StoreError(f"{path} is damaged: {error}; put a copy of it back") from error


def take_in(
    folder: Path, order: Mapping[str, Any], rounds: int, secret: bytes, request: Publish, body: bytes
) -> int:
    """Check and keep what a hub publishes to clients of this site. Gives the round.

    Args:
        folder: of the run.
        order: what the site keeps of the run.
        rounds: that the run has.
        secret: of the site's receipts.

    Raises:
        RefusalError: the body is no download, or the request is of an earlier round, or names a client or a
            private state that is not here.
        WriteError: it cannot be kept.
    """
    check_download(body, "a model of the end")
    number, receipts = request.round, request.clients
    if not 1 <= number <= rounds:
        raise RefusalError(f"round {number} of {rounds}")
    if number < order["round"]:
        raise RefusalError(f"round {number} is over: this site has answered in round {order['round']}")
    if set(receipts) - set(order["names"].values()):
        raise RefusalError("a client that is not here")
    vault = Vault(folder / "clients", secret)
    for client, receipt in receipts.items():
        try:
            vault.read(client, receipt)
        except StoreError as error:
            # The text names this machine's files.
            raise RefusalError(f"a private state of {client!r} that is not here") from error
    Published(folder).keep(number, receipts, request.model, body)
    return number


NOT_SENT = "the hub has not sent its model yet: it does at the end of a run"


def export_client(
    config: SiteConfig, folder: Path, *, run: str = "", client: str | None = None, merge: bool = False
) -> Export:
    """Write a client's model after a run's last round, as :func:`prefed.runs.export.write_model` does.

    It reads what `prefed site` keeps, and changes nothing of it: both may run at the same time.

    Args:
        run: the beginning of the run's name; empty: the run that ended last.
        client: by its own name or the one that the hub knows it by; ``None``: the site's only one.
        merge: a whole model, not an adapter.

    Raises:
        RunError: there is no such run, or it has not ended; no such client; or the base model or the data are
            others than in the run.
        StoreError: a file of the state folder is missing or damaged.
        ConfigError, DataError, ModelError: the site's file, data or model cannot be used, or the folder's
            format has no place for the model.
    """
    silence_transformers()
    state = Path(config.state)
    place = _run_folder(state, run)
    order = _order(place)
    told = _told_name(order["names"], client)
    given, message = _given(place, told)
    private = _private(place, told, given, order["round"])
    experiment, names, members = begun_experiment(order, config), order["names"], order["members"]
    with tempfile.TemporaryDirectory(prefix="prefed-pairs-") as scratch:
        pairs = _pairs(experiment, order["data"], state / "cache", Path(scratch, "data"))
        among = member_dataset(pairs, names, members, experiment.privacy.minimum_pairs)
        # Log-probabilities stay in memory: `prefed site` may be writing those on the disk.
        trainers = build_trainers(experiment, among, None)
        if trainers.fingerprint["model"] != given.model:
            raise RunError(
                f"the base model {config.model.name} is not the one of run {place.name}: put that one "
                "back, or say where it is in [model] name of the site's file"
            )
        job = assemble_job(experiment, trainers)
        own = job.method.init_client(trainers.initial, told) if private is None else decode_state(private)
        tensors = job.client_model(told, own, decode_download(message), given.round)
        more = write_tensors(trainers.backbone, tensors, folder, merge=merge)
    return Export(client or told, None, False, None, merge, more, trainers.backbone.config)


def _run_folder(state: Path, name: str) -> Path:
    """The folder of the run whose name begins so; of none, of the run that ended last."""
    runs = {path.parent.name: path.parent for path in sorted((state / "runs").glob("*/order.json"))}
    if not runs:
        raise RunError(f"{state / 'runs'} holds no run: this site has taken part in none")
    shown = listed(sorted(runs), str)
    if name:
        found = [run for run in runs if run.startswith(name)]
        if len(found) != 1:
            what = f"{len(found)} runs begin" if found else "no run begins"
            raise RunError(f"{state / 'runs'}: {what} with {name!r}; the runs are {shown}")
        return runs[found[0]]
    ended = {time: folder for folder in runs.values() if (time := Published(folder).time)}
    if not ended:
        raise RunError(f"{state / 'runs'}: {NOT_SENT}; the runs are {shown}")
    return ended[max(ended)]


def _order(place: Path) -> dict[str, Any]:
    path = place / "order.json"
    try:
        return files.loads_with_digest(path.read_bytes())
    except files.DamagedError as error:
        raise StoreError(f"{path} is damaged: {error}; put a copy of it back") from error


def _told_name(names: Mapping[str, str], client: str | None) -> str:
    """The name by which the hub knows a client of this site.

    Args:
        names: own name → the name that the hub knows.
    """
    if client is None:
        if len(names) > 1:
            shown = listed(sorted(names), str)
            raise RunError(f"this site has {len(names):,} clients: name one with --client: {shown}")
        return next(iter(names.values()))
    told = names.get(client, client)
    if told not in names.values():
        raise RunError(f"this site: {no_client(client, sorted(names))}")
    return told


def _given(place: Path, client: str) -> tuple[Parting, bytes]:
    published = Published(place)
    if client not in published.clients():
        raise RunError(f"run {place.name}: {NOT_SENT}")
    return published.read(client)


def _private(place: Path, client: str, given: Parting, answered: int) -> bytes | None:
    """The client's private state that the hub's last round committed.

    Args:
        answered: the last round in which the site answered.
    """
    try:
        return Vault(place / "clients", site_secret(place.parents[1])).read(client, given.receipt)
    except StoreError as error:
        if answered <= given.round:
            raise
        raise RunError(
            f"run {place.name} has gone on after round {given.round}, of which the hub had sent its "
            "model: it sends another at the run's end"
        ) from error


def _pairs(experiment: Experiment, fingerprint: str, cache: Path, scratch: Path) -> FederatedDataset:
    """The pairs that the run started with: those kept, or else read again.

    Args:
        cache: the site's tokens, of any runs.
        scratch: takes them where they were deleted.
    """
    for manifest in sorted(cache.glob(f"**/{CLIENTS}")):
        if read_manifest(manifest.parent)["fingerprint"] == fingerprint:
            return FederatedDataset.open(manifest.parent)
    pairs = build_data(experiment, scratch)
    if pairs.fingerprint != fingerprint:
        raise RunError("this site's data changed since the run started: put back what they were")
    return pairs
