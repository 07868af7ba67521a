r"""How many labels by clients' noised votes are those without noise.

    OMP_NUM_THREADS=1 python experiments/privacy/votes.py

Clients of the synthetic dataset, with tastes of their own, vote on completions of a small model, in one
process of ``prefed``. At each ε of eight rounds with all clients and a sum of votes, the noise multiplier is
that of the accountant. Shares are means over draws of the noise, of the pairs that do not tie without it: of
all labels, and without the quarter of the pairs with the smallest noised sums, as with ``pairs = "best"``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from prefed import Experiment, run
from prefed.align.labels import NEAR_TIES
from prefed.align.stages import rows_in
from prefed.config import AlignConfig
from prefed.core import Key, Privacy
from prefed.data import Record, synthetic
from prefed.models.tiny import make_tiny
from prefed.privacy import Guarantee, guarantee_of, noised_votes, vote_noise
from prefed.runs.align import align
from prefed.runs.loaded_run import load_run
from prefed.runs.refresh import RunClients

ROUNDS, DELTA, DRAWS, EPSILONS = 8, 1e-5, 200, (2.0, 4.0, 8.0)
SHAPES = ((25, 2), (100, 2), (100, 4))
"""Prompts, and completions of each."""


def promised(privacy: Privacy) -> Guarantee:
    """What a release of any number of clients promises, all of which take part."""
    return guarantee_of(privacy, 1, 1)


def private(epsilon: float) -> Privacy:
    """Central noise with which eight rounds and one sum of votes have an ε."""
    one = Privacy(kind="central", clip=0.1, delta=DELTA, noise_multiplier=1.0)
    return one.model_copy(update={"noise_multiplier": promised(one).noise_for(epsilon, ROUNDS + 1, DELTA)})


def make(place: Path, clients: int) -> None:
    """Write the clients' pairs, a model, prompts and a run of one cheap round."""
    key = Key(0)
    synthetic.write(place, synthetic.generate(key, clients=clients, train=12, test=1))
    make_tiny(place / "model", synthetic.corpus(key, 2000), key, layers=2, width=64, heads=4, steps=400)
    asked = synthetic.generate(key.at("prompts"), clients=2, train=SHAPES[-1][0], test=1)
    # No client holds numbered prompts.
    lines = [f"{record.prompt} ({number})\n" for number, record in enumerate(asked[: SHAPES[-1][0]])]
    (place / "prompts.txt").write_text("".join(lines))
    tree: dict[str, Any] = {
        "rounds": 1,
        "data": {
            "train": str(place / "train.jsonl"),
            "test": str(place / "test.jsonl"),
            "partition": {"by": "column", "column": "client"},
            "max_length": 128,
            "duplicates": "keep",
        },
        "model": {"name": str(place / "model"), "lora": {"rank": 2}},
        "method": {"name": "fedbis", "lr": 1e-3, "local_steps": 1, "batch_size": 4},
        "merge": {"weights": "uniform"},
        "cohort": {"size": min(10, clients)},
        "evaluate": {"every": 0, "clients": 2},
        "privacy": private(EPSILONS[0]).model_dump(exclude_none=True),
        "engine": {"threads": 1},
    }
    run(Experiment.model_validate(tree), place / "run")


def votes_in(place: Path) -> dict[tuple[int, int], np.ndarray]:
    """Prompts and completions → the votes ``[M, n]`` of all clients, after an alignment with noise."""
    config = AlignConfig.model_validate(
        {
            "prompts": str(place / "prompts.txt"),
            "completions": SHAPES[-1][1],
            "max_new_tokens": 48,
            "temperature": 1.0,
            "labels": "clients",
            "client_judge": "utility",
            "pairs": "all",
            "epochs": 1,
            "held_out": 0,
        }
    )
    align(place / "run", config)
    folder = place / "run/align"
    texts = {(row["index"], row["sample"]): row for row in rows_in(folder / "completions.jsonl")}
    asked = [(row["index"], *row["samples"]) for row in rows_in(folder / "scores.jsonl")]
    pairs = [
        Record(texts[k, one]["prompt"], texts[k, one]["completion"], texts[k, other]["completion"])
        for k, one, other in asked
    ]
    votes = RunClients(load_run(place / "run", data=True), config).votes.scores(pairs)[1]
    return {
        (prompts, count): votes[:, [k < prompts and max(samples) < count for k, *samples in asked]]
        for prompts, count in SHAPES
    }


def shares(votes: np.ndarray, privacy: Privacy) -> tuple[float, float]:
    """The share of labels that noise leaves as they are: of all, and of the clear ones."""
    total, found = votes.sum(0), []
    for draw in range(DRAWS):
        noised = noised_votes(votes, privacy, Key(1).at("draw", draw))
        clear = np.abs(noised) >= np.quantile(np.abs(noised), NEAR_TIES)
        same = np.sign(noised) == np.sign(total)
        found.append((same[total != 0].mean(), same[(total != 0) & clear].mean()))
    return tuple(np.mean(found, axis=0))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=200)
    clients = parser.parse_args().clients
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make(place, clients)
        heads = (
            "prompts",
            "completions",
            "pairs",
            "mean majority",
            "ε",
            "z",
            "ε of the rounds",
            "noise",
            "same",
        )
        print(f"| {' | '.join(heads)} | same of clear |\n{'|---' * (len(heads) + 1)}|")
        for (prompts, completions), votes in votes_in(place).items():
            majority = np.abs(votes.sum(0)).mean()
            for epsilon in EPSILONS:
                privacy = private(epsilon)
                rounds = promised(privacy).epsilon(ROUNDS, DELTA)
                noise = vote_noise(privacy, clients, votes.shape[1])
                same, clear = shares(votes, privacy)
                what = f"{prompts} | {completions} | {votes.shape[1]} | {majority:.0f} | {epsilon:g}"
                z = privacy.noise_multiplier
                print(f"| {what} | {z:.2f} | {rounds:.2f} | {noise:.0f} | {same:.2f} | {clear:.2f} |")


if __name__ == "__main__":
    main()
