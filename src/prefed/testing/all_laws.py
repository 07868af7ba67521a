"""All laws for one method, and the law of a run, which trains a tiny language model."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prefed.core import Callback, Key, files
from prefed.core.plugins import allow, is_code
from prefed.core.records import RoundRecord
from prefed.core.wire import encode
from prefed.merge import MergeConfig
from prefed.methods import MethodKind
from prefed.testing.laws import (
    RULES,
    Problem,
    check_few_pairs,
    check_kind,
    check_messages,
    check_models,
    check_order,
    check_private_bytes,
    check_resume,
)


def check_method(name: str, settings: Mapping[str, Any] | None = None, *, sent: Collection[str] = ()) -> None:
    """Check in a few seconds that a method satisfies all laws.

    Each LoRA rule that the method does not refuse with a ``ValueError`` is tried.

    Args:
        name: as in ``[method] name``: an installed method, or ``./FILE.py``.
        settings: settings that differ from their defaults. Without ``local_steps`` and ``local_epochs``,
            visits have 2 steps.
        sent: see :func:`check_private_bytes`.

    Raises:
        AssertionError: the method breaks a law.
        ValueError: there is no such method.
    """
    kind = _kind(name)
    settings = dict(settings or {})
    if not {"local_steps", "local_epochs"} & set(settings):
        settings["local_steps"] = 2
    check_kind(kind, settings)
    problem = Problem(kind, settings)
    server = all(exchange.to != "neighbours" for exchange in problem.build().exchanges)
    check_models(problem)
    if server:
        check_few_pairs(problem)
    for rule in RULES:
        problem = Problem(kind, settings, MergeConfig(lora=rule))
        try:
            problem.build()
        except ValueError:
            continue
        check_messages(problem)
        check_private_bytes(problem, sent=sent)
        if server:
            check_resume(problem)
            check_order(problem)
    check_run(name, settings)


def check_run(name: str, settings: Mapping[str, Any] | None = None) -> None:
    """A run that is stopped after its first round and resumed equals the uninterrupted run, bit for bit.

    Its evaluation from disk gives the metrics of its summary, and its model can be exported. The run has two
    rounds and two clients, and a randomly initialised model of two blocks.

    Args:
        settings: settings that differ from their defaults.
    """
    from prefed.config import Experiment
    from prefed.models.pretrained import silence_transformers
    from prefed.runs.evaluate import evaluate
    from prefed.runs.export import write_model
    from prefed.runs.loaded_run import load_run
    from prefed.runs.run import run
    from prefed.store import RunReader

    kind = _kind(name)
    silence_transformers()
    with TemporaryDirectory(prefix="prefed-testing-") as made:
        folder = Path(made)
        _write_model_and_pairs(folder)
        experiment = Experiment(
            rounds=2,
            data={
                "train": str(folder / "pairs.jsonl"),
                "partition": {"by": "column", "column": "client"},
                "test_fraction": 0.5,
            },
            model={"name": str(folder / "model"), "lora": {"rank": 2}},
            method={"name": name, **(settings or {})},
            engine={"threads": 1},
        )
        whole, parts = folder / "whole", folder / "parts"
        result = run(experiment, whole)
        try:
            run(experiment, parts, callbacks=[_StopAfterOneRound()])
        except _StopError:
            run(experiment, parts, resume=True)
        one, other = RunReader(whole), RunReader(parts)
        states = [(one.server(), other.server(), "the server's state")]
        loaded = load_run(whole, data=True)
        for client in loaded.clients:
            first, second = one.client(client), other.client(client)
            if first is not None and second is not None:
                states.append((first, second, f"the private state of {client}"))
            elif first is not second:
                raise AssertionError(
                    f"{kind.name}: {client} has a private state in only one of two equal runs"
                )
        for first, second, what in states:
            if encode(first) != encode(second):
                raise AssertionError(f"{kind.name}: after a stop and a resume, {what} is another one")
        again = evaluate(loaded).plain()["preference_accuracy"]
        before = result.summary["preference_accuracy"]
        if again != before:
            raise AssertionError(f"{kind.name}: the accuracy was {before}, but {again} from disk")
        personal = loaded.method.personal
        if personal or result.adapter is not None:
            write_model(whole, folder / "export", client=loaded.clients[0] if personal else None)


def _kind(name: str) -> MethodKind:
    from prefed.config import method_kind

    if is_code(name):
        allow(name)
    return method_kind(name)


class _StopError(Exception):
    """Ends a run."""


class _StopAfterOneRound(Callback):
    def on_round_end(self, record: RoundRecord) -> None:
        raise _StopError


def _write_model_and_pairs(folder: Path) -> None:
    from prefed.data import synthetic
    from prefed.models.tiny import make_tiny

    records = synthetic.generate(Key(0), clients=2, train=8, test=0)
    rows = [
        {"prompt": r.prompt, "chosen": r.chosen, "rejected": r.rejected, "client": r.client} for r in records
    ]
    files.write(folder / "pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    texts = [f"{row['prompt']} {row['chosen']}" for row in rows]
    make_tiny(
        folder / "model", texts, Key(0), layers=2, width=32, heads=2, vocabulary=300, context=256, steps=1
    )
