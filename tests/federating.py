"""Sites and hubs for tests: three workers' pairs in a file each, and a transport within one process."""

from threading import Lock

from prefed import Experiment
from prefed.engines.backends.worker_pool import TaskServer
from prefed.networks.federation.config import SiteConfig
from prefed.networks.federation.site import Site
from prefed.networks.federation.transport import LongAnswerError, UnreachableError
from workers import CLIENTS


def experiment(place, method="fedpdpo", rounds=3, **changes):
    return Experiment.model_validate(
        {
            "seed": 3,
            "rounds": rounds,
            "data": {
                "train": str(place / "pairs.jsonl"),
                "test_fraction": 0.2,
                "partition": {"by": "column", "column": "worker"},
            },
            "model": {"name": str(place / "model"), "lora": {"rank": 2, "dropout": 0.1}},
            "method": {"name": method, "lr": 0.01, "local_steps": 2, "batch_size": 4, **changes},
            "engine": {"threads": 1},
        }
    )


def site_config(place, folder, client, **changes):
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


class Within:
    """Carries requests to sites of this process.

    Args:
        before: called with a site and a request's header before each call; what it raises ends the call.
    """

    def __init__(self, sites, before=lambda site, request: None):
        self.sites, self.before = sites, before

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None

    def restrict(self, sites):
        self.members = {*sites}

    def connected(self):
        return set(self.sites)

    def call(self, site, request, timeout, most):
        self.before(site, request)
        if site not in self.sites:
            raise UnreachableError("it is switched off")
        answer = self.sites[site].answer(request)
        if len(answer) > most:
            raise LongAnswerError(f"its answer has {len(answer):,} bytes, at most {most:,} are allowed")
        return answer


class Here:
    """A process that trains, in this process. Models are loaded one at a time: transformers asks for that."""

    turn = Lock()

    def __init__(self):
        self.server = TaskServer()

    def build(self, factory, threads):
        with self.turn:
            self.due = self.server.build(factory, threads)

    def give(self, task, state, timeout):
        with self.turn:
            self.due = self.server.do(state, **vars(task))

    def receive(self):
        return self.due

    def stop(self):
        self.due = None


def open_sites(place, folder, clients=CLIENTS, **changes):
    return {f"site-{c}": Site(site_config(place, folder, c, **changes)) for c in clients}
