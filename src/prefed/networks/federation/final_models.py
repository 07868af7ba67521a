"""Downloads of the last round at a site, and ``prefed site export``, which builds clients' models from them.

A client's model is its download plus its private state. An index maps each client to the file of its download
and to the receipt of its private state. A file is written before the index refers to it, so an interrupted
write leaves the previous version intact. Readers need no lock.
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
from prefed.networks.federation.config import SiteConfig
from prefed.networks.federation.experiment import started_experiment
from prefed.networks.federation.judging import config_of
from prefed.networks.federation.messages import Publish, check_download
from prefed.networks.federation.site_limits import RefusalError
from prefed.networks.federation.vault import Vault, site_secret
from prefed.runs.build import assemble_job, build_data, build_trainers
from prefed.runs.export import Export, write_tensors
from prefed.runs.finished_run import RunError, no_client
from prefed.store import StoreError

_INDEX = "clients.json"
SEND_AGAIN = "resume the run at the hub (--resume) to receive it again"


@dataclass(frozen=True)
class Parting:
    """Index entry of a client's download.

    Attributes:
        round: the last round.
        receipt: receipt of the client's private state; ``None`` for the initial state.
        model: fingerprint of the base model.
        file: file name of the download.
    """

    round: int
    receipt: str | None
    model: str
    file: str


class Published:
    """The downloads that clients of one run received after the last round.

    Args:
        folder: the run's folder at the site.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "published"

    def keep(self, number: int, receipts: Mapping[str, str | None], model: str, message: bytes) -> None:
        """Store ``message`` as the download of these clients, replacing earlier ones.

        Raises:
            WriteError: it cannot be written. The earlier downloads stay valid.
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
        """Time of the last download (ISO 8601, UTC); empty if there is none."""
        return str(self._index().get("time", ""))

    def clients(self) -> dict[str, Parting]:
        """Index entries by the name that the hub knows a client by.

        Raises:
            StoreError: the index is damaged.
        """
        return {client: Parting(**entry) for client, entry in self._index().get("clients", {}).items()}

    def read(self, client: str) -> tuple[Parting, bytes]:
        """Read the index entry and the download of a client.

        Raises:
            KeyError: the client has no download.
            StoreError: the download is missing or damaged.
        """
        while True:
            given = self.clients()[client]
            path = self._folder / given.file
            try:
                message = path.read_bytes()
            except FileNotFoundError:
                # A newer download may have replaced it in the meantime.
                if self.clients()[client] == given:
                    raise StoreError(f"{path} is missing: {SEND_AGAIN}") from None
                continue
            if files.digest(message) not in given.file:
                raise StoreError(f"{path} is damaged: {SEND_AGAIN}")
            return given, message

    def _index(self) -> dict[str, Any]:
        path = self._folder / _INDEX
        return _intact(path) if path.exists() else {}


def take_in(
    folder: Path, order: Mapping[str, Any], rounds: int, secret: bytes, request: Publish, body: bytes
) -> int:
    """Check and store the download of the last round for clients of this site; return the round.

    Args:
        order: the site's record of the run.
        rounds: number of rounds of the run.
        secret: key of the site's receipts.

    Raises:
        RefusalError: the body is not a download, the round is over, or the site does not have a client or a
            private state that the request names.
        WriteError: it cannot be stored.
    """
    check_download(body, "the download of the last round")
    number, receipts = request.round, request.clients
    if not 1 <= number <= rounds:
        raise RefusalError(f"round {number} does not exist: the run has {rounds} rounds")
    if number < order["round"]:
        raise RefusalError(f"round {number} is over: this site already answered in round {order['round']}")
    if set(receipts) - set(order["names"].values()):
        raise RefusalError("the client is not at this site")
    vault = Vault(folder / "clients", secret)
    for client, receipt in receipts.items():
        try:
            vault.read(client, receipt)
        except StoreError as error:
            # The error names files of this machine, so it is not sent.
            raise RefusalError(f"the private state of client {client!r} is not at this site") from error
    Published(folder).keep(number, receipts, request.model, body)
    return number


NOT_SENT = "the hub has not sent the final models yet: it sends them at the end of a run"


def export_client(
    config: SiteConfig, folder: Path, *, run: str = "", client: str | None = None, merge: bool = False
) -> Export:
    """Write a client's final model, like :func:`prefed.runs.export.write_model`.

    The state folder is only read, so `prefed site` may run at the same time.

    Args:
        run: prefix of the run's name (default: the run that ended last).
        client: the client's name at the site or at the hub (default: the only client).
        merge: write a full model instead of an adapter.

    Raises:
        RunError: the run or the client does not exist, the run has not ended, or the base model or the data
            changed since the run.
        StoreError: a file of the state folder is missing or damaged.
        ConfigError, DataError, ModelError: the site's file, data or model cannot be used, or the output
            format does not support the model.
    """
    state = Path(config.state)
    place = _run_folder(state, run)
    order = _intact(place / "order.json")
    name = _reported_name(order["names"], client)
    published = Published(place)
    if name not in published.clients():
        raise RunError(f"run {place.name}: {NOT_SENT}")
    given, message = published.read(name)
    private = _private(place, name, given, order["round"])
    experiment = started_experiment(order, config_of(config, order, place))
    with tempfile.TemporaryDirectory(prefix="prefed-pairs-") as scratch:
        pairs = _pairs(experiment, order["data"], state / "cache", Path(scratch, "data"))
        least = max(1, experiment.privacy.minimum_pairs)
        among = pairs.renamed(order["names"]).among(order["members"], least)
        # No cache of log-probabilities: `prefed site` may be writing it at the same time.
        trainers = build_trainers(experiment, among, None)
        if trainers.fingerprint["model"] != given.model:
            raise RunError(
                f"the base model {config.model.name} is not the one used in run {place.name}: restore it, or "
                "set [model] name in the site's file to its folder"
            )
        job = assemble_job(experiment, trainers)
        own = job.method.init_client(trainers.initial, name) if private is None else decode_state(private)
        tensors = job.client_model(name, own, decode_download(message), given.round)
        more = write_tensors(trainers.backbone, tensors, folder, merge=merge)
    return Export(client or name, None, False, None, merge, more, trainers.backbone.config)


def _run_folder(state: Path, name: str) -> Path:
    """The folder of the run with this prefix, or of the run that ended last if the prefix is empty."""
    runs = {path.parent.name: path.parent for path in sorted((state / "runs").glob("*/order.json"))}
    if not runs:
        raise RunError(f"{state / 'runs'} contains no runs: this site has not taken part in any")
    shown = listed(sorted(runs), str)
    if name:
        found = [run for run in runs if run.startswith(name)]
        if len(found) != 1:
            what = f"{len(found)} runs start" if found else "no run starts"
            raise RunError(f"{state / 'runs'}: {what} with {name!r}; the runs are {shown}")
        return runs[found[0]]
    ended = {time: folder for folder in runs.values() if (time := Published(folder).time)}
    if not ended:
        raise RunError(f"{state / 'runs'}: {NOT_SENT}; the runs are {shown}")
    return ended[max(ended)]


def _intact(path: Path) -> dict[str, Any]:
    """The contents of a JSON file, checked against its digest."""
    try:
        return files.loads_with_digest(path.read_bytes())
    except files.DamagedError as error:
        raise StoreError(f"{path} is damaged: {error}; restore it from a copy") from error


def _reported_name(names: Mapping[str, str], client: str | None) -> str:
    """The name by which the hub knows a client of this site.

    Args:
        names: client → the name reported to the hub.
    """
    if client is None:
        if len(names) > 1:
            shown = listed(sorted(names), str)
            raise RunError(f"this site has {len(names):,} clients: select one with --client: {shown}")
        return next(iter(names.values()))
    reported = names.get(client, client)
    if reported not in names.values():
        raise RunError(f"this site: {no_client(client, sorted(names))}")
    return reported


def _private(place: Path, client: str, given: Parting, answered: int) -> bytes | None:
    """The client's private state in the hub's last commit.

    Args:
        answered: the last round in which the site answered.
    """
    try:
        return Vault(place / "clients", site_secret(place.parents[1])).read(client, given.receipt)
    except StoreError as error:
        if answered <= given.round:
            raise
        raise RunError(
            f"run {place.name} was resumed after round {given.round}, the round of the stored final models: "
            "wait until it ends, when the hub sends new ones"
        ) from error


def _pairs(experiment: Experiment, fingerprint: str, cache: Path, scratch: Path) -> FederatedDataset:
    """The pairs with which the run started, from the cache or tokenised again.

    Args:
        cache: the site's cache of tokens.
        scratch: folder for the tokens if they are not in the cache.
    """
    for manifest in sorted(cache.glob(f"**/{CLIENTS}")):
        if read_manifest(manifest.parent)["fingerprint"] == fingerprint:
            return FederatedDataset.open(manifest.parent)
    pairs = build_data(experiment, scratch)
    if pairs.fingerprint != fingerprint:
        raise RunError("this site's data changed since the run started: restore them")
    return pairs
