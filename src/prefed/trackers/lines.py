"""What happened in a run, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefed.core.records import RoundRecord
from prefed.core.text import duration, size


def loss_and_accuracy(record: RoundRecord) -> list[str]:
    """Loss and accuracy of a round's record, as far as it has them.

    >>> loss_and_accuracy({"loss": 0.69314, "preference_accuracy": 0.5})
    ['loss 0.6931', 'preference accuracy 0.500']
    """
    figures = []
    if record.get("loss") is not None:
        figures.append(f"loss {record['loss']:.4f}")
    if record.get("preference_accuracy") is not None:
        figures.append(f"preference accuracy {record['preference_accuracy']:.3f}")
    return figures


def round_line(record: RoundRecord, rounds: int) -> str:
    """A round's record, a line of ``rounds.jsonl``, for a person.

    >>> round_line({"round": 1, "loss": 0.69314, "bytes_up": 1500, "bytes_down": 20, "seconds": 2.04}, 9)
    'round 1/9  loss 0.6931  up 1.5 kB  down 20 B  2.0 s'
    """
    figures = loss_and_accuracy(record)
    figures.append(f"up {size(record['bytes_up'])}  down {size(record['bytes_down'])}")
    figures.append(f"{record['seconds']:.1f} s")
    return f"round {record['round']}/{rounds}  {'  '.join(figures)}"


def stage_line(stage: str, figures: Mapping[str, Any]) -> str:
    """What a stage of an alignment did: its counts, and its time.

    >>> stage_line("labels", {"pairs": 1200, "labelled": 800, "mean": 0.5, "seconds": 95.0})
    'labels: pairs 1,200  labelled 800  1m35s'
    """
    counts = [f"{name} {value:,}" for name, value in figures.items() if isinstance(value, int)]
    return f"{stage}: {'  '.join([*counts, duration(figures['seconds'])])}"
