"""Reference points without federated training: what length, words, a frozen model and other people predict.

    python experiments/people/reference.py --model FOLDER          # after cuts.py; FOLDER as in methods.toml

Every accuracy is a mean over people on their test pairs, with a 95% interval over people (Student's t). The
strength of each ridge penalty is chosen on validation pairs. The last part is a mixed logistic model: all
people share a slope of each feature, and each person deviates from it. It says how much of the variance of
judgements, on the scale of log-odds, is shared, personal and noise. Writes ``reference.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cuts import HERE, by_person, read
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import csr_array
from scipy.special import expit

from prefed.core import files
from prefed.train.metrics import seed_interval

Array = NDArray[np.float64]
Rows = Sequence[Mapping[str, Any]]
Features = Callable[[Rows], Any]
"""Rows → features of the chosen less those of the rejected response, ``[n, k]``, perhaps sparse."""
STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Ridge penalties to choose from, in units of a pair's log-loss."""
CONTESTED = (0.25, 0.75)
COMPONENTS = 8
"""Principal components of the frozen model's features in the mixed model."""


def interval(values: Sequence[float] | Array) -> tuple[float, float]:
    """Mean, and half of its 95% interval by Student's t.

    >>> interval([0.5, 0.5, 0.5])
    (0.5, 0.0)
    """
    low, high = seed_interval([*map(float, values)]) or (math.nan, math.nan)
    return float(np.mean(values)), (high - low) / 2


def per_person(rows: Rows, right: Array, where: Array | None = None) -> dict[str, float]:
    """Person → the mean of ``right`` over its rows, or those of ``where``."""
    found: dict[str, list[float]] = {}
    for k, row in enumerate(rows):
        if where is None or where[k]:
            found.setdefault(row["person"], []).append(float(right[k]))
    return {person: float(np.mean(own)) for person, own in sorted(found.items())}


def is_contested(row: Mapping[str, Any]) -> bool:
    """Whether 25% to 75% of the other judges agree.

    >>> is_contested({"others_agree": 0.75}), is_contested({"others_agree": None})
    (True, False)
    """
    return row["others_agree"] is not None and CONTESTED[0] <= row["others_agree"] <= CONTESTED[1]


def ordered(margins: Array) -> Array:
    """1 for a pair in order, 0.5 for a tie, else 0."""
    return (np.sign(margins) + 1) / 2


# ---- features


def surface(text: str) -> list[float]:
    """Log of the length, mean length of words, log of words a sentence, shares of capitals and of ! and ?.

    >>> [round(value, 2) for value in surface("Two words. AND!")]
    [2.71, 3.67, 0.41, 0.33, 0.07]
    """
    words, letters = re.findall(r"\w+", text), [c for c in text if c.isalpha()]
    sentences = max(1, len(re.findall(r"[.!?]+", text)))
    return [
        math.log(max(1, len(text))),
        sum(map(len, words)) / max(1, len(words)),
        math.log(max(1, len(words)) / sentences),
        sum(c.isupper() for c in letters) / max(1, len(letters)),
        sum(c in "!?" for c in text) / max(1, len(text)),
    ]


def differences(vectors: Mapping[tuple[str, str], Array]) -> Features:
    """The features of rows from those of (prompt, response)."""
    # Of two standard features, the difference has about twice the variance.
    return lambda rows: (
        math.sqrt(0.5)
        * np.array(
            [vectors[row["prompt"], row["chosen"]] - vectors[row["prompt"], row["rejected"]] for row in rows]
        )
    )


def responses(rows: Rows) -> list[tuple[str, str]]:
    """All (prompt, response), once, in order."""
    return sorted({(row["prompt"], row[name]) for row in rows for name in ("chosen", "rejected")})


def standard(vectors: Mapping[tuple[str, str], Sequence[float]]) -> dict[tuple[str, str], Array]:
    """Every feature with mean 0 and variance 1 over responses."""
    values = np.array([*vectors.values()], float)
    values = (values - values.mean(0)) / np.maximum(values.std(0), 1e-9)
    return dict(zip(vectors, values, strict=True))


def words_of(each: tuple[str, str]) -> Counter[Any]:
    """Lower-case words and pairs of neighbours in a response."""
    words = re.findall(r"\w+|[!?.,]", each[1].lower())
    return Counter([*words, *map(" ".join, pairwise(words))])


def itself(each: tuple[str, str]) -> Counter[Any]:
    """The response as a whole: its slope is its strength, after Bradley and Terry."""
    return Counter([each])


def counted(training: Rows, parts: Callable[[tuple[str, str]], Counter[Any]], least: int) -> Features:
    """Square roots of the counts of ``parts`` that at least so many training responses have."""
    seen = Counter(part for each in responses(training) for part in parts(each))
    index = {part: k for k, part in enumerate(sorted(part for part in seen if seen[part] >= least))}

    def features(rows: Rows) -> Any:
        at, values = [], []
        for k, row in enumerate(rows):
            for sign, name in ((1, "chosen"), (-1, "rejected")):
                for part, count in parts((row["prompt"], row[name])).items():
                    if part in index:
                        at.append((k, index[part]))
                        values.append(sign * math.sqrt(count))
        return csr_array((values, np.array(at).reshape(-1, 2).T), shape=(len(rows), len(index)))

    return features


def frozen(model: str, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[float]]:
    """(prompt, response) → mean last hidden state over the response's tokens."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    found = {}
    with torch.no_grad():
        for prompt, response in wanted:
            before, after = (tokenizer(text)["input_ids"] for text in (prompt, " " + response))
            ids = torch.tensor([(before + after)[:512]])
            found[prompt, response] = network(ids).last_hidden_state[0, len(before) :].mean(0).tolist()
    return found


# ---- logistic regressions


def logistic(x: Any, strength: float) -> Array:
    """The slopes that make all rows of ``x`` positive, with a ridge penalty."""

    def loss(w: Array) -> tuple[float, Array]:
        margins = x @ w
        value = np.logaddexp(0, -margins).sum() + strength * (w @ w) / 2
        return value, strength * w - x.T @ expit(-margins)

    return minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 300}).x


def chosen_strength(train: Any, validation: Any) -> float:
    """The strength whose slopes order most validation pairs."""
    return max(STRENGTHS, key=lambda strength: ordered(validation @ logistic(train, strength)).mean())


class Split(NamedTuple):
    """Rows to learn from, to choose on and to judge."""

    train: Rows
    validation: Rows
    test: Rows


def pooled(features: Features, split: Split) -> Array:
    """The margins of test pairs by one regression for all."""
    train, validation, test = map(features, split)
    return test @ logistic(train, chosen_strength(train, validation))


def alone(features: Features, split: Split) -> Array:
    """The margins of test pairs by each person's own regression; one strength for all people."""
    train, owned = features(split.train), [[row["person"] for row in rows] for rows in split]

    def margins(strength: float, part: int) -> Array:
        x, people, found = features(split[part]), np.array(owned[part]), np.zeros(len(owned[part]))
        for person in set(owned[part]):
            slopes = logistic(train[np.array(owned[0]) == person], strength)
            found[people == person] = x[people == person] @ slopes
        return found

    return margins(max(STRENGTHS, key=lambda strength: ordered(margins(strength, 1)).mean()), 2)


# ---- what is personal


class Mixed(NamedTuple):
    """Shared slopes ``[k]``, variances of deviations ``[k]``, people's deviations ``[people, k]``."""

    shared: Array
    variances: Array
    deviations: Array


def mixed(x: Array, people: NDArray[np.int64], steps: int = 150) -> Mixed:
    """P(chosen) = σ(x·(w + u)), u ~ N(0, diag(τ²)) for each person, by EM with Laplace's approximation."""
    count, k = int(people.max()) + 1, x.shape[1]
    sizes = np.bincount(people, minlength=count)
    padded = np.zeros((count, sizes.max(), k))
    for person in range(count):
        padded[person, : sizes[person]] = x[people == person]
    shared, u, variances = logistic(x, 1.0), np.zeros((count, k)), np.full(k, 0.02)
    turned = padded.transpose(0, 2, 1)
    for _ in range(steps):
        for _ in range(2):
            p = expit(np.einsum("pmk,pk->pm", padded, shared + u))
            curvature = (turned * (p * (1 - p))[:, None]) @ padded
            inverse = np.linalg.inv(curvature + np.diag(1 / variances))
            left = np.einsum("pmk,pm->pk", padded, 1 - p) - u / variances
            u = u + np.einsum("pkl,pl->pk", inverse, left)
        # Where the shared slopes are best, pulls cancel: Σ u/τ² = 0.
        shared, u = shared + u.mean(0), u - u.mean(0)
        variances = np.maximum((u**2 + np.einsum("pkk->pk", inverse)).mean(0), 1e-8)
    return Mixed(shared, variances, u)


def shares(fit: Mixed, x: Array) -> dict[str, float]:
    """Shares of the variance of judgements on the scale of log-odds, where noise has π²/3."""
    second = x.T @ x / len(x)
    parts = {
        "shared": float(fit.shared @ second @ fit.shared),
        "personal": float(np.diag(second) @ fit.variances),
        "noise": math.pi**2 / 3,
    }
    return {name: part / sum(parts.values()) for name, part in parts.items()}


def possible_gain(fit: Mixed, x: Array, draws: int = 200, seed: int = 0) -> float:
    """What knowing everybody's slopes would add to the accuracy of the shared ones, if the model is true."""
    rng = np.random.default_rng(seed)
    u = rng.normal(size=(draws, x.shape[1])) * np.sqrt(fit.variances)
    own = x @ (fit.shared + u).T
    common = np.sign(x @ fit.shared)[:, None]
    return float((expit(np.abs(own)) - expit(common * own)).mean())


def shuffled(rows: Rows, people: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Who judged, exchanged among the judgements of one side of one debate."""
    found, prompts = people.copy(), np.array([row["prompt"] for row in rows])
    for prompt in set(prompts):
        (at,) = np.nonzero(prompts == prompt)
        found[at] = rng.permutation(people[at])
    return found


def personal(features: Features, split: Split, permutations: int, resamples: int) -> dict[str, Any]:
    """The mixed model of the training pairs: shares, their null and interval, and accuracy on test pairs."""
    names = {person: k for k, person in enumerate(by_person(split.train))}
    people = np.array([names[row["person"]] for row in split.train])
    x, test = features(split.train), features(split.test)
    fit, rng = mixed(x, people), np.random.default_rng(0)
    null = [shares(mixed(x, shuffled(split.train, people, rng)), x)["personal"] for _ in range(permutations)]
    drawn = []
    for _ in range(resamples):
        picked = rng.integers(len(names), size=len(names))
        rows = [np.nonzero(people == person)[0] for person in picked]
        again = np.repeat(np.arange(len(names)), [len(own) for own in rows])
        drawn.append(shares(mixed(x[np.concatenate(rows)], again), x[np.concatenate(rows)])["personal"])
    owner = np.array([names[row["person"]] for row in split.test])
    slopes = {"common": fit.shared + 0 * fit.deviations, "own": fit.shared + fit.deviations}
    slopes["another's"] = np.roll(slopes["own"], 1, 0)
    right = {
        name: per_person(split.test, ordered((test * own[owner]).sum(1))) for name, own in slopes.items()
    }
    observed = shares(fit, x)
    return {
        "shares": observed,
        "personal, 95% of resampled people": np.quantile(drawn, [0.025, 0.975]).tolist() if drawn else None,
        "personal, people exchanged": [float(np.mean(null)), float(np.max(null))] if null else None,
        "p": (1 + sum(value >= observed["personal"] for value in null)) / (1 + permutations),
        "possible gain": possible_gain(fit, test),
        "accuracy": right,
        "own less common": interval([right["own"][name] - right["common"][name] for name in right["own"]]),
        "own less another's": interval(
            [right["own"][name] - right["another's"][name] for name in right["own"]]
        ),
        "variances": fit.variances.tolist(),
        "slopes": fit.shared.tolist(),
    }


# ---- all of them


def references(split: Split, model: str | None, permutations: int, resamples: int) -> dict[str, Any]:
    """Name → kind of test pairs → accuracy of every person; ``personal`` → the mixed model."""
    everything = [*split.train, *split.validation, *split.test]
    plain = standard({each: surface(each[1]) for each in responses(everything)})
    agree = np.array([0.5 if (own := row["others_agree"]) is None else own for row in split.test]) - 0.5
    words = counted(split.train, words_of, 2)
    found = {
        "the longer argument": np.array([len(row["chosen"]) - len(row["rejected"]) for row in split.test]),
        "the others' votes on the pair": agree,
        "five surface features, pooled": pooled(differences(plain), split),
        "each argument's strength, pooled": pooled(counted(split.train, itself, 1), split),
        "bag of words, pooled": pooled(words, split),
        "bag of words, each person alone": alone(words, split),
    }
    basis = plain
    if model is not None:
        states = standard(frozen(model, responses(everything)))
        found["frozen features, pooled"] = pooled(differences(states), split)
        found["frozen features, each person alone"] = alone(differences(states), split)
        values = np.array([*states.values()])
        parts = values @ np.linalg.svd(values, full_matrices=False)[2][:COMPONENTS].T
        parts /= parts.std(0)
        basis = {each: np.append(plain[each], part) for each, part in zip(states, parts, strict=True)}
    contested = np.array([*map(is_contested, split.test)])
    kinds = {"all": None, "contested": contested, "agreed": ~contested}
    accuracy = {
        name: {kind: per_person(split.test, ordered(margins), where) for kind, where in kinds.items()}
        for name, margins in found.items()
    }
    return {"accuracy": accuracy, "personal": personal(differences(basis), split, permutations, resamples)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=HERE, help="the folder of cuts.py's files")
    parser.add_argument("--model", help="a folder or hub name; left out: no frozen features")
    parser.add_argument("--permutations", type=int, default=50)
    parser.add_argument("--resamples", type=int, default=50)
    parser.add_argument("--out", type=Path, default=HERE / "reference.json")
    args = parser.parse_args()
    names = ("people-all.train", "people.validation", "people.test")
    split = Split(*(read(args.data / f"{name}.jsonl.gz") for name in names))
    found = references(split, args.model, args.permutations, args.resamples)
    files.write(args.out, json.dumps(found, indent=1).encode())
    for name, people in found["accuracy"].items():
        lowest = sorted(people["all"].values())[: max(1, len(people["all"]) // 10)]
        shown = ", ".join(
            "{} {:.3f} ± {:.3f}".format(kind, *interval([*own.values()])) for kind, own in people.items()
        )
        print(f"{name}: {shown}, worst tenth {np.mean(lowest):.3f}")
    for name, value in found["personal"].items():
        if name == "accuracy":
            for kind, people in value.items():
                print("mixed model, {} slopes: {:.3f} ± {:.3f}".format(kind, *interval([*people.values()])))
        else:
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
