"""What a person should know of a run's data before it trains: what was left out, and clients to look at."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefed.config import Experiment
from prefed.core import Callback
from prefed.core.text import listed, pluralize
from prefed.data import DataConfig, FederatedDataset
from prefed.data.dataset import Findings, RowCounts
from prefed.engines import Job
from prefed.train.pair_trainer import PairTrainerFactory

LEFT_OUT: Mapping[str, tuple[str, str]] = {
    "too_long": ("longer than max_length", "raise [data] max_length"),
    "invalid": ("malformed or blank", '[data] invalid = "error" names them'),
    "duplicates": ("repeats", '[data] duplicates = "keep" keeps repeats'),
    "identical": ("equal responses", ""),
    "short": ("fewer than min_characters", "lower [data] min_characters"),
    "leaks": ("also tested on", ""),
    "unplaced": ("test rows of no training client", ""),
    "ties": ("no preference", ""),
    "limited": ("over the limit", ""),
}
"""Why rows are left out, by the fields of :class:`~prefed.data.RowCounts`: in words, and what would help."""
CUT: Mapping[str, tuple[str, str]] = {
    "cut": ("prompt lost its beginning to fit", "prompts lost their beginning to fit"),
    "shortened": ("pair lost the end of a response to fit", "pairs lost the end of a response to fit"),
}
"""How pairs that are used were cut, in words for one and for several."""
_NO_LOSS = ("ties", "limited")
"""Rows that are left out as they should be."""
_MUCH = 0.1
"""The share of rows left out, or of pairs cut, from which on a run warns."""


def left_out_table(counts: RowCounts) -> dict[str, Any]:
    """Rows, those dropped by cause, and pairs that were cut, as ``summary.json`` has them."""
    cut = {name: getattr(counts, name) for name in CUT}
    return {"rows": counts.rows, "pairs": counts.kept, "dropped": counts.left_out, **cut}


def left_out_text(table: Mapping[str, Any]) -> str:
    """What :func:`left_out_table` says, in a sentence; empty where nothing was left out or cut.

    >>> left_out_text({"rows": 60, "pairs": 27, "dropped": {"too_long": 33}, "cut": 1, "shortened": 0})
    '27 of 60 rows are used; left out: 33 longer than max_length; 1 prompt lost its beginning to fit'
    >>> left_out_text({"rows": 60, "pairs": 60, "dropped": {}, "cut": 0, "shortened": 0})
    ''
    """
    parts = []
    if table["dropped"]:
        causes = ", ".join(f"{count:,} {LEFT_OUT[name][0]}" for name, count in table["dropped"].items())
        parts.append(f"{table['pairs']:,} of {table['rows']:,} rows are used; left out: {causes}")
    parts += [pluralize(table[name], *words) for name, words in CUT.items() if table.get(name)]
    return "; ".join(parts)


def data_notices(dataset: FederatedDataset) -> tuple[list[str], list[str]]:
    """Notes on a dataset, and warnings. They name clients, and quote no pair."""
    counts, findings = dataset.row_counts, dataset.findings
    text = left_out_text(left_out_table(counts))
    lost = sum(count for name, count in counts.left_out.items() if name not in _NO_LOSS)
    cut = counts.cut + counts.shortened
    much = lost > _MUCH * (counts.rows - counts.ties) or cut > _MUCH * counts.kept
    notes = [text] if text and not much else []
    warnings = [f"{text}{_worst(dataset)}{_remedies(counts)}"] if much else []
    if findings.ignored:
        notes.append(f"not read, for their names say no known kind: {listed(findings.ignored, str)}")
    if findings.gone:
        who = pluralize(len(findings.gone), "client has", "clients have")
        warnings.append(f"{who} no pair left to train on and takes no part: {listed(findings.gone)}")
    warnings += _names(findings)
    single = [name for name in dataset.clients if dataset.sizes[name].train == 1]
    if single:
        who = pluralize(len(single), "client has", "clients have")
        warnings.append(f"{who} a single training pair: {listed(single)}")
    return notes, warnings


def _worst(dataset: FederatedDataset, most: int = 3) -> str:
    """The clients that lose the largest shares of their rows, of those that lose much."""
    shares = {}
    for name, lost in dataset.findings.lost.items():
        rows = lost + sum(dataset.sizes.get(name, ()))
        if lost > _MUCH * rows:
            shares[name] = (-lost / rows, name, f"{name!r} ({lost:,} of {rows:,})")
    worst = [text for *_, text in sorted(shares.values())]
    return f"; clients that lose most: {listed(worst, str, most)}" if worst else ""


def _remedies(counts: RowCounts) -> str:
    whole = "; more keeps prompts whole" if counts.cut else ""
    needed = f" ({counts.needed:,} keeps all pairs{whole})" if counts.needed else ""
    texts = [
        LEFT_OUT[name][1] + (needed if name == "too_long" else "")
        for name in counts.left_out
        if LEFT_OUT[name][1]
    ]
    if (counts.cut or counts.shortened) and "too_long" not in counts.left_out:
        texts.append("raise [data] max_length, so that nothing is cut")
    return f"; {'; '.join(texts)}" if texts else ""


def _names(findings: Findings) -> list[str]:
    """Warnings of names that may be meant as one, and of blanks around a name."""
    texts = [
        f"{listed(group, _visible(group))} count as different clients: their names differ only in case, "
        "blanks or the encoding of a letter. Write each in one way, or merge them as groups of the "
        "partition's column"
        for group in findings.similar
        if len(group) > 1
    ]
    blank = [name for (name, *others) in findings.similar if not others]
    return texts + ([f"blanks around a client's name are part of it: {listed(blank)}"] if blank else [])


def _visible(names: Sequence[str]) -> Callable[[str], str]:
    """How names are shown: letter by letter, where two of them would look the same."""
    looks = {unicodedata.normalize("NFKC", name) for name in names}
    return repr if len(looks) == len(names) else ascii


def settings_warnings(data: DataConfig, batch: int, window: int | None, sizes: Sequence[float]) -> list[str]:
    """Warnings of settings that do not fit the clients or the model.

    Args:
        batch: pairs that make an optimiser step.
        window: tokens that the model can read; ``None`` where it has no limit.
        sizes: of the clients that train.
    """
    warnings = []
    default = DataConfig.model_fields["max_length"].default
    if window is not None and data.max_length > window and data.max_length != default:
        warnings.append(
            f"[data] max_length = {data.max_length:,} is above the model's context of {window:,} tokens: set "
            f"max_length = {window}, so that longer pairs are cut to what the model can read"
        )
    most = max(sizes, default=batch)
    if batch > most:
        warnings.append(
            f"[method] batch_size: a step takes {batch:,} pairs, and no client has more than {most:,.0f}: "
            "each step takes all pairs of its client"
        )
    return warnings


def notices(experiment: Experiment, job: Job) -> tuple[list[str], list[str]]:
    """Notes and warnings of a run's data, and of its settings in view of them."""
    trainers = job.trainers
    assert isinstance(trainers, PairTrainerFactory)
    notes, warnings = data_notices(trainers.dataset)
    # Of clients of other machines the sizes are not known here.
    here = [size for client, size in job.weights.items() if client in trainers.dataset.clients]
    sizes = here or list(job.weights.values())
    batch = experiment.method.settings.step_pairs()
    return notes, warnings + settings_warnings(experiment.data, batch, trainers.backbone.window, sizes)


def announce(experiment: Experiment, job: Job, callback: Callback) -> None:
    """Report what a person should know of a run's data to its callback."""
    notes, warnings = notices(experiment, job)
    for note in notes:
        callback.on_note(note)
    for warning in warnings:
        callback.on_warning(warning)
