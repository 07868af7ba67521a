"""Sites and hubs for tests: three workers' pairs in a file each, and a transport within one process."""

from collections.abc import Collection, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from finished import small_experiment
from prefed import Experiment
from prefed.engines import JobFactory, Task
from prefed.engines.backends.worker_pool import TaskServer
from prefed.networks.federation.config import SiteConfig
from prefed.networks.federation.site import Site
from prefed.networks.federation.transport import LongAnswerError, Transport, UnreachableError
from workers import CLIENTS


def experiment(place: Path, method: str = "fedpdpo", rounds: int = 3, **changes: Any) -> Experiment:
    """Over all pairs of :func:`workers.make_place`."""
    tables = small_experiment(place, rounds=rounds)
    tables["data"] |= {"train": str(place / "pairs.jsonl"), "test": None, "test_fraction": 0.2}
    tables["model"]["lora"]["dropout"] = 0.1
    tables["method"] |= {"name": method, "local_steps": 2, **changes}
    return Experiment.model_validate(tables)


def site_config(place: Path, folder: Path, client: str, **changes: Any) -> SiteConfig:
    return SiteConfig.model_validate(
        {
            "federation": "wards",
            "name": f"site-{client}",
            "state": str(folder / f"site-{client}"),
            "data": {
                "train": str(place / f"{client}.jsonl"),
                "partition": {"by": "column", "column": "worker"},
            },
            "model": {"name": str(place / "model")},
            "disclose": {"pairs": True},
            **changes,
        }
    )


class Within(Transport):
    """Carries requests to sites of this process.

    Args:
        before: called with a site and a request's header before each call; what it raises ends the call.
    """

    def __init__(self, sites: Mapping[str, Site], before: Any = lambda site, request: None) -> None:
        self.sites, self.before = sites, before

    def __exit__(self, *exception: object) -> None: ...

    def restrict(self, sites: Collection[str]) -> None:
        self.members = {*sites}

    def connected(self) -> set[str]:
        return set(self.sites)

    def call(self, site: str, request: bytes, timeout: float, most: int) -> bytes:
        self.before(site, request)
        if site not in self.sites:
            raise UnreachableError("it is switched off")
        answer = self.sites[site].answer(request)
        if len(answer) > most:
            raise LongAnswerError(f"its answer has {len(answer):,} bytes, at most {most:,} are allowed")
        return answer


class Receipts:
    """A hub's receipts where nothing is kept: every client has its first state."""

    def read(self, client: str) -> None:
        return None

    def stage(self, client: str, state: bytes) -> None:
        raise AssertionError


class Here:
    """A process that trains, in this process. Models are loaded one at a time: transformers asks for that."""

    turn = Lock()

    def __init__(self) -> None:
        self.server = TaskServer()

    def build(self, factory: JobFactory, threads: int) -> None:
        with self.turn:
            self.due = self.server.build(factory, threads)

    def give(self, task: Task, state: bytes | None, timeout: float) -> None:
        with self.turn:
            self.due = self.server.do(state, **vars(task))

    def receive(self) -> dict[str, Any]:
        return self.due

    def stop(self) -> None: ...


def closed(sites: Mapping[str, Site]) -> None:
    for site in sites.values():
        site.close()


def open_sites(place: Path, folder: Path, clients: Any = CLIENTS, **changes: Any) -> dict[str, Site]:
    return {f"site-{c}": Site(site_config(place, folder, c, **changes)) for c in clients}
