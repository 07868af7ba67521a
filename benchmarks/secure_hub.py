"""A hub that was taken over and keeps every byte: what it learns from secure sums over NVIDIA FLARE.

    OMP_NUM_THREADS=1 python benchmarks/secure_hub.py
    OMP_NUM_THREADS=1 python benchmarks/secure_hub.py replayed invented      # some of its parts

Four sites as processes of their own, ten personas with eight training pairs each, FedDPO. The hub is
prefed's own, but notes all requests and answers, and lies where a row says so. It knows candidate pairs of
each persona, those that were trained on and 32 others, and scores each by ⟨u, −∇L(pair; φ)⟩ / ‖∇L(pair; φ)‖
as ``membership.py`` does, added up over the rounds, with u one of these:

    an upload           of a plain run, which needs no sums: the positive control
    a site's words      masked, one site
    three sites' words  those of all sites but the client's own
    the sum             of all four, with its noise
    a difference        of two sums of a round, one with and one without the client's site

The sum of metrics after the last round, of the three other sites, is over pairs that were not trained on: a
candidate is the less likely one of them, the less its own metrics fit to the sum. ``all sums`` adds both
scores as logarithms of likelihoods.

``membership`` is the mean area under the ROC curve of members against others over clients, and 1.96 standard
errors. A run with nearly no noise shows that masks hide what they should, and that the scores of sums would
find something if noise did not.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from attacked import HEAD, PATIENCE, free_port, logged, print_row
from common import SHARED, TOKENIZER, trainers_of
from membership import auc
from secure_sums import exchange_keys
from wards import Federation, rounds_of

from prefed.config import Experiment
from prefed.core import Callback, Key, Tensors
from prefed.core.wire import decode_download, decode_upload, encode
from prefed.engines.validation import summed_metrics
from prefed.models.pretrained import silence_transformers
from prefed.networks.federation.audit_log import SentLog
from prefed.networks.federation.config import Terms
from prefed.networks.federation.federate import experiment_for_sites, federate
from prefed.networks.federation.flare.kits import Kits
from prefed.networks.federation.flare.transport import FlareTransport
from prefed.networks.federation.hub import Attempt, Sites
from prefed.networks.federation.messages import Keys, Sum
from prefed.networks.federation.privacy_ledger import Releases
from prefed.networks.federation.transport import Transport, UnreachableError
from prefed.networks.federation.unix_socket import HEADER, pack, unpack
from prefed.privacy import Grid
from prefed.privacy.secure import Identity, Participant, sum_words
from prefed.runs.build import build_job

Row = tuple[str, str, str, str]
Numbers = np.ndarray[Any, np.dtype[np.float64]]
SITES = {"north": 3, "south": 3, "east": 2, "west": 2}
PAIRS, OTHERS, ROUNDS = 8, 32, 3
CLIP, NOISE, NEARLY_NONE = 0.1, 2.0, 0.01
DIFFERS = ROUNDS
"""The round in which the hub gets all sums and then says that west was away."""


class Tap(Transport):
    """A transport that keeps what passes.

    Args:
        hide: site and request → whether the hub says that the site is away once it has the answer.
        change: site, request and answer → the answer that the hub reads.
    """

    def __init__(
        self,
        transport: Transport,
        hide: Callable[[str, dict[str, Any]], bool],
        change: Callable[[str, dict[str, Any], bytes], bytes] = lambda site, header, answer: answer,
    ) -> None:
        self._transport, self._hide, self._change = transport, hide, change
        self.kept: list[tuple[str, dict[str, Any], bytes, dict[str, Any], bytes]] = []

    def __exit__(self, *exception: object) -> None:
        """Leave the transport open for the next run."""

    def connected(self) -> Any:
        """As the transport's."""
        return self._transport.connected()

    def restrict(self, sites: Collection[str]) -> None:
        """As the transport's."""
        self._transport.restrict(sites)

    def call(self, site: str, request: bytes, timeout: float, most: int) -> bytes:
        """As the transport's."""
        answer = self._transport.call(site, request, timeout, most)
        (header, body), (said, words) = unpack(request), unpack(answer)
        self.kept.append((site, header, body, said, words))
        if self._hide(site, header):
            raise UnreachableError("it is away, says the hub")
        return self._change(site, header, answer)


class Warned(Callback):
    """Keeps what the hub prints."""

    def __init__(self) -> None:
        self.texts = list[str]()

    def on_warning(self, text: str) -> None:
        """As the class's."""
        self.texts.append(text)


class Place:
    """Four sites, a hub's transport, and what the hub knows: the candidates and the model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, count, source in (("train", PAIRS, "train"), ("test", OTHERS, "test")):
            with gzip.open(SHARED / "data" / f"personas.{source}.jsonl.gz", "rt") as stream:
                rows = [json.loads(line) for line in stream]
            kept = []
            for persona in sorted({row["persona"] for row in rows})[: sum(SITES.values())]:
                kept += [row for row in rows if row["persona"] == persona][:count]
            (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in kept))
        self.federation = Federation(folder, free_port(), SITES, "persona", TOKENIZER, watched=True)
        exchange_keys(self.federation)
        self.homes = {c: site for site, own in self.federation.homes.items() for c in own}
        self.known = build_job(self.experiment(NOISE), folder / "known")

    def __enter__(self) -> Place:
        self.federation.start(*SITES)
        self.transport = FlareTransport(Kits.open(self.federation.of("hub"))).__enter__()
        self.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self.transport.__exit__()
        self.federation.stop()

    def wait(self) -> None:
        """Wait until all sites are connected."""
        while len(self.transport.connected()) < len(SITES):
            time.sleep(0.5)

    def experiment(self, noise: float | None, rounds: int = ROUNDS) -> Experiment:
        """The experiment, plain without a noise multiplier."""
        private = {"kind": "distributed", "clip": CLIP, "delta": 1e-5, "colluders": 0}
        return Experiment.model_validate(
            {
                "rounds": rounds,
                "data": {
                    "train": str(self.folder / "train.jsonl"),
                    "test": str(self.folder / "test.jsonl"),
                    "partition": {"by": "column", "column": "persona"},
                },
                "model": {"name": str(TOKENIZER), "lora": {"rank": 8, "dropout": 0.0}},
                "method": {"name": "feddpo", "lr": 1e-3, "local_steps": 1, "batch_size": PAIRS},
                "merge": {"weights": "uniform"},
                "evaluate": {"every": 0},
                "engine": {"threads": 1},
                **({} if noise is None else {"privacy": {**private, "noise_multiplier": noise}}),
            }
        )

    def run(
        self,
        name: str,
        noise: float | None,
        hide: Callable[[str, dict[str, Any]], bool] = lambda site, header: False,
        rounds: int = ROUNDS,
    ) -> tuple[Path, Tap]:
        """A run of prefed's hub; its directory, and all that passed."""
        tap, out = Tap(self.transport, hide), self.folder / name
        federate(self.experiment(noise, rounds), out, tap, Terms("wards", (*SITES,)))
        return out, tap

    def log(self, site: str, what: str) -> str:
        """What the last line of a site's own log that has some words says."""
        return logged(SentLog(self.federation.of(site) / "state" / "log"), site, what)

    def spent(self, site: str, noise: float = NOISE) -> int:
        """How many releases a site has counted of its first client, if all had this noise."""
        client = self.federation.homes[site][0]
        state = self.federation.of(site) / "state"
        return round(Releases(state).spent().get(client, 0.0) * noise**2)


class Slopes:
    """The directions in which training on one candidate moves a model.

    Args:
        model: from which the hub sent sites out.
    """

    def __init__(self, place: Place, model: Tensors) -> None:
        self._job, self._goal = place.known, place.experiment(None).method.settings.goal()
        self._before = self._job.trainers.initial.replace(model)
        self._found = dict[str, Numbers]()

    def of(self, client: str, update: Numbers) -> Numbers:
        """The score of each of a client's candidates, members first."""
        if client not in self._found:
            trainers = trainers_of(self._job)
            data = trainers.dataset.clients[client]
            visit = trainers.trainer(client, self._job.round(1), Key(0), self._job.method.ownership)
            rows = []
            for row in np.concatenate([data.train, data.test]):
                one = replace(visit, rows=np.array([row]))
                slope, _ = one.gradient(self._before, self._goal, batch_size=0, name="candidate")
                rows.append((-slope.flat / slope.flat.norm()).double().numpy())
            self._found[client] = np.stack(rows)
        return self._found[client] @ update


def summed(place: Place, noise: float, uploads: Iterable[bytes]) -> Numbers:
    """The sum of masked words, in the unit of updates."""
    words = [np.frombuffer(each, "<u4") for each in uploads]
    grid = Grid.of(place.experiment(noise).privacy, len(SITES), len(place.homes))
    return grid.numbers(sum_words(words))


def membership(scores: Mapping[str, Numbers]) -> str:
    """The mean area over clients, and 1.96 standard errors."""
    areas = [auc(each[:PAIRS], each[PAIRS:]) for each in scores.values()]
    error = 1.96 * statistics.stdev(areas) / math.sqrt(len(areas))
    return f"{statistics.mean(areas):.2f} ± {error:.2f}"


def learned(place: Place) -> Iterator[Row]:
    """It scores the candidates by all that it holds."""
    plain = dict[str, Numbers]()
    slopes = dict[int, Slopes]()
    for _, header, body, _, message in place.run("plain", None)[1].kept:
        if header["kind"] == "visit":
            sent = decode_download(body).tensors["model"]
            score = slopes.setdefault(header["round"], Slopes(place, sent))
            update = (decode_upload(message).tensors["model"] - sent).flat.double().numpy()
            add(plain, header["client"], score.of(header["client"], update))
    yield "membership: an upload of a plain run", f"NOT STOPPED: {membership(plain)}", "", ""
    for noise in (NOISE, NEARLY_NONE):
        before = place.spent("west", noise)
        limits = {
            what: statistics.NormalDist().cdf(math.sqrt(releases / 2) / noise)
            for what, releases in (("the sum", ROUNDS), ("the sum of metrics", 1), ("all sums", ROUNDS + 1))
        }
        for what, scores in sums(place, noise).items():
            promised = f" (ε allows {limits[what]:.2f})" if what in limits else ""
            yield f"membership, z = {noise:g}: {what}", membership(scores) + promised, "", ""
        counted = place.spent("west", noise) - before
        yield (
            f"z = {noise:g}: two sums in round {DIFFERS}, of four and of three sites",
            f"north counts {place.spent('north', noise)} releases in all, west {counted}",
            f"{ROUNDS} rounds and an evaluation",
            place.log("north", '"sum"'),
        )


def sums(place: Place, noise: float) -> dict[str, dict[str, Numbers]]:
    """What is scored → client → the scores of its candidates, from a run with secure sums."""

    def hide(site: str, header: dict[str, Any]) -> bool:
        return (site, header.get("exchange"), header.get("round")) == ("west", "train", DIFFERS)

    held: dict[tuple[int, int], dict[str, bytes]] = {}
    models, metrics = dict[int, Tensors](), dict[str, bytes]()
    for site, header, body, _, words in place.run(f"sums-{noise:g}", noise, hide)[1].kept:
        if header["kind"] == "sum" and header["exchange"]:
            held.setdefault((header["round"], header["attempt"]), {})[site] = words
            models[header["round"]] = decode_download(body).tensors["model"]
        elif header["kind"] == "sum":
            metrics[site], evaluated = words, decode_download(body).tensors["model"]
    tables: dict[str, dict[str, Numbers]] = {}
    for number, model in models.items():
        score, uploads = Slopes(place, model), held[number, 1]
        total = summed(place, noise, uploads.values())
        for client, home in place.homes.items():
            others = [words for site, words in uploads.items() if site != home]
            seen = {
                "a site's words": summed(place, noise, [uploads[home]]),
                "three sites' words": summed(place, noise, others),
                "the sum": total,
            }
            if number == DIFFERS and home == "west":
                seen["a difference"] = total - summed(place, noise, held[number, 2].values())
            for what, numbers in seen.items():
                add(tables.setdefault(what, {}), client, score.of(client, numbers))
    tables["the sum of metrics"] = from_metrics(place, noise, metrics, evaluated)
    # A pair's direction has about its share of an update of full length, and the noise of the sum is z C.
    share = 1 / (math.sqrt(PAIRS) * CLIP * noise**2)
    for client, scores in tables["the sum"].items():
        tables.setdefault("all sums", {})[client] = scores * share + tables["the sum of metrics"].get(
            client, 0
        )
    return tables


def from_metrics(
    place: Place, noise: float, uploads: Mapping[str, bytes], model: Tensors
) -> dict[str, Numbers]:
    """Client → for each candidate, the logarithm of the likelihood that it is not one of those evaluated."""
    job, metrics, trainers = place.known, summed_metrics(place.known), trainers_of(place.known)
    grid = metrics.grid(place.experiment(noise).privacy, len(uploads), len(place.homes))
    words = [np.frombuffer(each, "<u4") for each in uploads.values()]
    total = grid.numbers(sum_words(words))[: len(metrics.names)]
    own = dict[str, Numbers]()
    for client in (client for client, site in place.homes.items() if site in uploads):
        data = trainers.dataset.clients[client]
        rows = np.concatenate([data.train, data.test])
        scores: Any = trainers.pair_trainer.score(trainers.initial.replace(model), rows, [])
        parts = {name: getattr(scores, name) for name in ("policy", "reference", "lengths")}
        single = [
            replace(scores, **{name: part[[row]] for name, part in parts.items()}) for row in range(len(rows))
        ]
        own[client] = np.array([[each.metrics(job.beta)[name] for name in metrics.names] for each in single])
    # What the sum is above what it would be if all candidates were evaluated.
    rest = total - sum(each.mean(0) - 0.5 for each in own.values())
    return {
        client: -((each - each.mean(0)) @ rest) / (OTHERS * grid.deviation**2) for client, each in own.items()
    }


def add(scores: dict[str, Numbers], client: str, more: Numbers) -> None:
    """Add a round's scores of a client."""
    scores[client] = scores.get(client, np.zeros(PAIRS + OTHERS)) + more


class Asked:
    """A run that the hub begins with all sites, which it then asks for sums of its choice."""

    def __init__(self, place: Place) -> None:
        self.place, self.run = place, secrets.token_hex(8)
        experiment = place.experiment(NOISE, rounds=9)
        self.sites = Sites(place.transport, "wards", self.run, PATIENCE)
        self.text = experiment_for_sites(experiment)
        for site in SITES:
            self.join(site)
        sent = place.known.method.exchanges[0].send(
            place.known.method.init_server(place.known.trainers.initial),
            min(place.homes),
            place.known.round(1),
        )
        self.body, self.other = (
            encode(replace(sent, tensors={"model": sent.tensors["model"] * by})) for by in (1.0, 0.5)
        )
        self.size = sent.tensors["model"].layout.size

    def join(self, site: str) -> None:
        """Send the run to a site, which gives its keys."""
        self.sites.join(site, self.text)
        members = sorted(self.place.homes)
        self.sites.start(site, members, [], self.place.known.trainers.fingerprint["model"])

    def requests(
        self, number: int, attempt: Literal[1, 2] = 1, without: Collection[str] = (), body: bytes = b""
    ) -> dict[str, Sum]:
        """The requests of a sum, by site."""
        sites = [site for site in SITES if site not in without]
        clients = {site: dict.fromkeys(own, None) for site, own in self.place.federation.homes.items()}
        about = Attempt(attempt, "train", sites, self.size, clients)
        return self.sites.request_sum(about, sites, number, body or self.body)

    def ask(self, site: str, request: Sum, body: bytes = b"") -> tuple[str, bytes]:
        """What a site says to a request, and its words."""
        data = pack(body or self.body, **request.model_dump())
        answer = self.place.transport.call(site, data, PATIENCE, HEADER + 4 * self.size)
        header, words = unpack(answer)
        said = header.get("refused") or header.get("failed") or next((k for k in header if header[k]), "")
        return "answered" if words else str(said), words

    def all(self, requests: Mapping[str, Sum]) -> dict[str, bytes]:
        """The words of all sites."""
        return {site: self.ask(site, request)[1] for site, request in requests.items()}

    def merges(self, uploads: Mapping[str, bytes]) -> str:
        """What prefed's hub makes of these uploads."""
        grid = Grid.of(self.place.experiment(NOISE).privacy, len(uploads), len(self.place.homes))
        words = [np.frombuffer(each, "<u4") for each in uploads.values()]
        return "merged" if grid.plausible(sum_words(words)) else "random: not merged"


def replayed(place: Place) -> Iterator[Row]:
    """It repeats a round to a site that was killed, and to one whose disk was restored."""
    run = Asked(place)
    first = run.requests(1)
    uploads = run.all(first)
    control = f"the four answers: {run.merges(uploads)}"
    before = place.spent("north")
    place.federation.kill("north")
    place.federation.start("north")
    _, same = run.ask("north", first["north"])
    yield (
        "a sum is asked for again after `kill -9` of its site",
        f"the same bytes: {same == uploads['north']}; counts {place.spent('north') - before}",
        control,
        place.log("north", '"sum"'),
    )
    without = run.requests(1, without=["west"])["north"]
    said = [run.ask("north", without)[0]]
    run.join("north")
    said.append(run.ask("north", run.requests(1, without=["west"])["north"])[0])
    second, _ = run.ask("north", run.requests(1, 2, ["west"])["north"])
    yield (
        "then a sum of other sites, under the same attempt",
        f"before and after it joins again: {' and '.join(said)}",
        f"a second attempt: {second}",
        place.log("north", '"sum"'),
    )
    state = place.federation.of("north") / "state"
    kept = place.folder / "kept"
    place.federation.kill("north")
    shutil.copytree(state, kept)
    place.federation.start("north")
    run = Asked(place)
    old = run.requests(2)
    uploads = run.all(old)
    place.federation.kill("north")
    shutil.rmtree(state)
    shutil.copytree(kept, state)
    place.federation.start("north")
    said = [run.ask("north", old["north"])[0]]
    run.join("north")
    said.append(run.ask("north", old["north"])[0])
    yield (
        "the disk of a site is restored, and the old round asked for again",
        f"before and after it joins again: {'; '.join(said)}",
        f"the four answers before: {run.merges(uploads)}",
        place.log("north", "own keys"),
    )
    new = run.requests(2)
    said = [run.ask(site, new[site])[0] for site in ("south", "east", "west")]
    _, words = run.ask("north", new["north"])
    yield (
        "the same round with its new keys",
        f"the others: {', '.join(sorted({*said}))}; its new words with their old ones: "
        + run.merges({**uploads, "north": words}),
        f"the next round: {run.merges(run.all(run.requests(3)))}",
        place.log("south", '"sum"'),
    )


def inconsistent(place: Place) -> Iterator[Row]:
    """It shows one site another model, other sites, another experiment."""
    run = Asked(place)
    honest = run.all(run.requests(1))
    control = f"one for all: {run.merges(honest)}"
    requests = run.requests(2)
    uploads = {site: run.ask(site, requests[site])[1] for site in SITES if site != "west"}
    other = run.requests(2, body=run.other)["west"]
    said, words = run.ask("west", other, run.other)
    yield "west gets another model", f"{said}; {run.merges({**uploads, 'west': words})}", control, ""
    requests = run.requests(3)
    uploads = {site: run.ask(site, requests[site])[1] for site in SITES if site != "west"}
    said, words = run.ask("west", run.requests(3, without=["east"])["west"])
    yield (
        "west gets a list of sites without east",
        f"{said}; {run.merges({**uploads, 'west': words})}; without east's: "
        + run.merges({**{s: w for s, w in uploads.items() if s != "east"}, "west": words}),
        control,
        place.log("west", '"sum"'),
    )
    changed = run.requests(4)["west"].model_copy(update={"round": 5})
    yield "a changed request", run.ask("west", changed)[0], control, place.log("west", "changed on its way")


def invented(place: Place) -> Iterator[Row]:
    """It puts a site of its own into the list, or takes a site's place."""
    run = Asked(place)
    control = f"the four: {run.merges(run.all(run.requests(1)))}"
    own = Keys.of(Participant(Identity(secrets.token_bytes(32)), "wards", run.run, "ghost").member)
    real = run.sites.keys["west"]
    for what, keys in (
        ("a site of its own", {"ghost": own}),
        ("its own keys in the name of west", {"west": own.model_copy(update={"site": "west"})}),
        ("west's identity and a key of its own", {"west": real.model_copy(update={"key": own.key})}),
    ):
        run.sites.keys.update(keys)
        sites = [*SITES, *(set(keys) - set(SITES))]
        about = Attempt(
            1, "train", sites, run.size, {"north": dict.fromkeys(place.federation.homes["north"])}
        )
        request = run.sites.request_sum(about, sites, 2, run.body)["north"]
        run.sites.keys.pop("ghost", None)
        run.sites.keys["west"] = real
        before = place.spent("north")
        said, _ = run.ask("north", request)
        counts = place.spent("north") - before
        yield (
            f"a list with {what}",
            f"{said[:90]} …; counts {counts}",
            control,
            place.log("north", '"refused"'),
        )
    few = run.requests(2, without=["south", "east"])["north"]
    yield "a sum of two sites", run.ask("north", few)[0], control, place.log("north", '"refused"')


def garbage(place: Place) -> Iterator[Row]:
    """A site sends random words with its signature; in the next round, a byte is flipped on the way."""
    (place.folder / "west.lies").write_text(json.dumps({"1": "random_words"}))

    def flips(site: str, header: dict[str, Any], answer: bytes) -> bytes:
        here = (site, header["kind"], header.get("round")) == ("west", "sum", 2)
        return answer[:-1] + bytes([answer[-1] ^ 1]) if here else answer

    tap = Tap(place.transport, lambda site, header: False, flips)
    out = place.folder / "garbage"
    warned = Warned()
    federate(place.experiment(NOISE), out, tap, Terms("wards", (*SITES,)), callbacks=[warned])
    (place.folder / "west.lies").unlink()
    texts = []
    for record in rounds_of(out):
        reasons = sorted({each["reason"] for each in record["dropped"]})
        texts.append("; ".join([f"{len(record['sum_sites'])} sites in the sum", *reasons]))
    yield (
        "west sends random words and signs them",
        texts[0],
        f"round 3: {texts[2]}",
        f"hub: {warned.texts[0]}",
    )
    yield "a byte of west's upload is flipped on the way", texts[1], f"round 3: {texts[2]}", ""


ATTACKS: tuple[Callable[[Place], Iterator[Row]], ...] = learned, replayed, inconsistent, invented, garbage


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", help="names of parts")
    only = parser.parse_args().only
    silence_transformers()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    try:
        with Place(folder) as place:
            print(HEAD)
            for attack in ATTACKS:
                if not only or attack.__name__ in only:
                    for row in attack(place):
                        print_row(*row)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
