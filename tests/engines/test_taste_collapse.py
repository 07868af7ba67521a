"""Whether a run says, while it continues, that its latent tastes have not separated."""

import numpy as np
import pytest
from tests.engines.test_experiment import place as place
from tests.engines.test_taste_run import tasty

from experiment_scripts import rows
from finished import small_experiment
from prefed import Experiment, run
from prefed.methods import METHODS
from prefed.methods.base.tastes import posteriors
from prefed.runs.tastes import TasteFigures
from prefed.store import RunReader
from preferences import jsonl
from toy import Warned

ROUNDS = 40
PERSONAS = ("interest-in-sports", "risk-averse")


def opposed(place, folder, **method):
    """A client that wants yes and one that wants no."""
    pairs = [
        {"prompt": f"Question {k}?", "chosen": " yes please", "rejected": " no thanks", "worker": f"w{k % 2}"}
        for k in range(40)
    ]
    base = tasty(place)
    tables = base.tables()
    tables["data"] |= {"train": str(jsonl(folder / "pairs.jsonl", pairs)), "flip": ["w1"]}
    settings = {"name": "fedvpa", "lr": 0.02, "local_steps": 2, "batch_size": 8, **method}
    changes = {"rounds": ROUNDS, "method": settings, "cohort": {}, "evaluate": {"every": 0}}
    return type(base).model_validate({**tables, **changes})


@pytest.mark.parametrize(
    ("method", "collapses"),
    [({"beta": 0.001}, False), ({"beta": 10.0, "pull": 0.0}, True)],
    ids=["separates", "collapses"],
)
def test_a_collapse_is_warned_of_once_while_the_run_goes_on(place, tmp_path, method, collapses):
    """A KL weighed ten thousand times as much leaves every client the same posterior. ``active_units`` of a
    round is counted here from the posteriors that the server keeps: variances over clients above 0.01.
    """
    heard = Warned()
    result = run(opposed(place, tmp_path, **method), tmp_path / "run", callbacks=[heard])
    rounds = RunReader(tmp_path / "run").rounds()
    means = np.stack([p.mean.double().numpy() for p in posteriors(result.server).values()])
    assert rounds[-1]["active_units"] == sum(np.var(means, axis=0) > 0.01)
    assert (rounds[ROUNDS // 2 - 1]["active_units"] < 2) == collapses
    got = [text for text in heard.texts if "have not separated" in text]
    assert len(got) == collapses
    log = (tmp_path / "run/run.log").read_text()
    assert log.count("have not separated") == collapses
    for text in got:
        assert text.startswith(f"round {ROUNDS // 2}: ")
        assert all(key in text for key in ("local_steps", "beta", "pool", "rounds"))


@pytest.mark.rare
def test_the_defaults_keep_opposed_tastes_apart(shared_data, shared_model, tmp_path):
    """Two personas, each with a client that wants the opposite of the same pairs. With one taste for all a
    selector is right on half of them, exactly. So it is with own z at the source's β of 0.1 and 30 steps.
    """
    for role, count in (("train", 48), ("test", 20)):
        given = rows(shared_data / f"personas.{role}.jsonl.gz")
        pairs = [
            {
                "prompt": row["prompt"],
                "chosen": row[good],
                "rejected": row[bad],
                "client": f"{persona} {good}",
            }
            for persona in PERSONAS
            for row in [row for row in given if row["persona"] == persona][:count]
            for good, bad in (("chosen", "rejected"), ("rejected", "chosen"))
        ]
        jsonl(tmp_path / f"{role}.jsonl", pairs)
    defaults = {"seed": 42, "model": {"name": str(shared_model)}, "method": {"name": "fedvpa"}}
    defaults |= {"rounds": METHODS["fedvpa"].rounds, "evaluate": {"every": 0}}
    tables = small_experiment(tmp_path, "client", **defaults)
    summary = run(Experiment.model_validate(tables), tmp_path / "run").summary
    assert summary["shared_accuracy"]["mean"] == 0.5
    assert summary["preference_accuracy"]["mean"] > 0.75


@pytest.mark.parametrize(("right", "collapsed"), [(0.95, False), (0.9, False), (0.75, True), (0.5, True)])
def test_one_taste_that_serves_all_clients_is_no_collapse(right, collapsed):
    """Every client's z is as good as any other's. If accuracy is low, the tastes have not separated;
    from an accuracy of 0.9, the clients want the same."""
    n = 4
    figures = TasteFigures(
        clients=tuple("abcd"),
        means=np.zeros((n, 2)),
        log_variances=np.zeros((n, 2)),
        accuracies=np.full((n, n), right),
        population=np.full(n, right),
        sent={},
        labels={},
        prototypes=np.zeros((0, 2)),
        trust={},
        trainable_share=0.1,
        met=0.0,
    )
    assert figures.plain()["collapsed"] is collapsed
