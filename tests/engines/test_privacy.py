"""What ``[privacy]`` keeps from leaving a client, on the toy federation: clients of 3 to 8 pairs."""

from dataclasses import replace
from functools import partial

import pytest
from tests.engines.test_hostile import BAD, forging, job, play

import toy
from prefed.core import Privacy
from prefed.core.wire import decode_upload, encode
from prefed.engines import InProcess
from prefed.engines.tasks import Task, run_task
from prefed.methods import METHODS
from prefed.store import RunReader

SIZES = {name: data.size for name, data in toy.ToyTrainers(toy.options()).data.items()}
MOST = max(SIZES.values())
SMALL = {name for name, size in SIZES.items() if size < 5}


class Eavesdropper(InProcess):
    """Keeps every upload that leaves a client."""

    def __init__(self, job, states, uploads):
        super().__init__(job, states)
        self.uploads = uploads

    def run(self, tasks):
        for result in super().run(tasks):
            if result.message.find(b'"upload') + 1:
                self.uploads.append(decode_upload(result.message))
            yield result


def test_the_toy_has_clients_on_both_sides():
    assert 2 <= len(SMALL) < len(SIZES)
    assert sum(SIZES[name] for name in SMALL) >= 5


def test_a_client_with_few_pairs_sends_no_mean_over_them(tmp_path):
    """Of both exchanges, one with a loss and one with a score; the round's loss is the others' mean by their
    pairs. Tensors, and so the model, are what they are without the bound, bit for bit."""
    free, bound = [], []
    for least, uploads in ((0, free), (5, bound)):
        backend = partial(Eavesdropper, uploads=uploads)
        toy.run(tmp_path / str(least), backend=backend, cohort=None, minimum_pairs=least)
    assert len(free) == len(bound) == 6 * (4 + 2)
    for one, other in zip(free, bound, strict=True):
        assert len(one.scalars) == 1
        assert other.scalars == ({} if one.client in SMALL else one.scalars)
        assert all(group.equal(other.tensors[name]) for name, group in one.tensors.items())
    runs = [RunReader(tmp_path / str(least)) for least in (0, 5)]
    left, right = (reader.server().tensors["model"] for reader in runs)
    assert left.equal(right)
    for number, record in enumerate(runs[1].rounds(), 1):
        tellers = [u for u in bound if u.sent_at == number and "loss" in u.scalars]
        total = sum(u.weight * u.scalars["loss"] for u in tellers)
        assert record["loss"] == pytest.approx(total / sum(u.weight for u in tellers))
        assert record["dropped"] == []


def test_a_client_evaluated_on_few_pairs_is_in_means_alone(tmp_path):
    """The mean is that of the run without the bound; worst, worst tenth and list are the other clients'."""
    for least in (0, 5):
        toy.run(tmp_path / str(least), minimum_pairs=least)
    for free, bound in zip(*(RunReader(tmp_path / str(n)).rounds() for n in (0, 5)), strict=True):
        for name in ("preference_accuracy", "reward_accuracy", "baseline_accuracy", "shared_accuracy"):
            before, after = free["evaluation"][name], bound["evaluation"][name]
            rest = {client: x for client, x in before["per_client"].items() if client not in SMALL}
            assert after["mean"] == before["mean"]
            assert after["per_client"] == rest
            assert after["worst"] == after["worst_decile"] == min(rest.values())
            assert after["mean_alone"] == len(SMALL)
        assert bound["evaluation"]["dpo_loss"] == free["evaluation"]["dpo_loss"]
        assert bound["preference_accuracy"] == free["preference_accuracy"]


def test_a_mean_that_would_give_one_small_client_away_leaves_it_out(tmp_path):
    """One client alone is below the bound: the mean over all, less the listed ones, would be its figure."""
    _, *others = sorted(SMALL)
    toy.run(tmp_path / "run", rounds=1, minimum_pairs=5, untested=others)
    (record,) = RunReader(tmp_path / "run").rounds()
    figure = record["evaluation"]["preference_accuracy"]
    assert figure["left_out"] == 1
    assert figure["mean"] == pytest.approx(sum(figure["per_client"].values()) / len(SIZES.keys() - SMALL))


def test_a_run_that_could_disclose_nobody_is_refused():
    with pytest.raises(
        ValueError, match=rf"minimum_pairs = 9: no metric .* no client has more than {MOST} test pairs"
    ):
        toy.build(toy.text(minimum_pairs=9))


def test_the_server_drops_what_a_client_ought_not_to_have_sent(tmp_path):
    """A client that was changed sends its loss all the same; the others' uploads merge."""

    def reporting(message):
        return encode(replace(decode_upload(message), scalars={"loss": 0.25}))

    small = min(SMALL)
    whole = replace(job(rounds=1), privacy=Privacy(minimum_pairs=5))
    _, (record,), _ = play(tmp_path / "run", whole, forging(reporting, small))
    (drop,) = record["dropped"]
    assert drop["client"] == small
    assert f"over {SIZES[small]} training pairs, fewer than [privacy] minimum_pairs" in drop["reason"]
    assert "loss" in drop["reason"]


@pytest.mark.parametrize(
    "name", sorted(set(METHODS) - {"fedpdpo", "decdpo", "feddpa", "fedvpl", "fedvpa", "icl"})
)
def test_every_method_does_without_the_losses_of_small_clients(tmp_path, name):
    """Every round merges everybody's upload, where some report their loss, under the schedule that asks for
    it; fedpdpo uploads as feddpo does, and its objective is not the toy's; decdpo has no server,
    icl no loss, and the toy no personal LoRA for feddpa. The toy's model has no taste: see
    ``tests/laws/test_taste_laws.py``."""
    whole = job(name, rounds=2, schedule="plateau")
    _, rounds, _ = play(tmp_path / "run", replace(whole, privacy=Privacy(minimum_pairs=5)))
    assert [record["dropped"] for record in rounds] == [[], []]
    assert None not in [record["loss"] for record in rounds]


def test_an_undeclared_number_of_a_small_client_is_still_refused():
    """Leaving out what may not be reported must not hide what was never declared."""
    one = replace(job(clients=3, rounds=1), privacy=Privacy(minimum_pairs=MOST))
    (exchange,) = one.method.exchanges

    def work(visit, private, download):
        upload, after = exchange.work(visit, private, download)
        return replace(upload, scalars={**upload.scalars, "length": 17.0}), after

    leaky = replace(one, method=replace(one.method, exchanges=(replace(exchange, work=work),)))
    message = encode(exchange.send(one.method.init_server(one.trainers.initial), BAD, one.round(1)))
    result = run_task(leaky, Task("visit", BAD, 1, "train", message), toy.MemoryStates())
    assert result.message == b""
    assert "numbers that the exchange does not expect: length" in result.withheld
