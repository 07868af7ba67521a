"""Notes and warnings on the data of a run: rows that are left out, unusual clients, unfit settings."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefed.config import Experiment
from prefed.core import Callback
from prefed.core.text import listed, pluralize
from prefed.data import DataConfig, FederatedDataset
from prefed.data.dataset import Findings, RowCounts
from prefed.data.sources.unread import unused_text
from prefed.engines import Job
from prefed.models.pretrained import precision_notes
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
"""Field of :class:`~prefed.data.RowCounts` → why rows are left out, and the remedy."""
CUT: Mapping[str, tuple[str, str]] = {
    "cut": ("prompt lost its beginning to fit", "prompts lost their beginning to fit"),
    "shortened": ("pair lost the end of a response to fit", "pairs lost the end of a response to fit"),
}
"""How pairs were cut, in the singular and the plural."""
_NO_LOSS = ("ties", "limited")
"""Causes that are intended."""
_MUCH = 0.1
"""Warn if a larger share of rows is left out, or of pairs is cut."""


def left_out_table(dataset: FederatedDataset) -> dict[str, Any]:
    """Return the counts of used, left-out and cut rows and the unused columns, as in ``summary.json``."""
    counts, unused = dataset.row_counts, list(dataset.findings.unread)
    cut = {name: getattr(counts, name) for name in CUT}
    rows = {"rows": counts.rows, "pairs": counts.kept, "dropped": counts.left_out}
    return {**rows, **cut, "unused_columns": unused}


def left_out_text(table: Mapping[str, Any]) -> str:
    """Format a :func:`left_out_table` as a sentence; empty if nothing was left out or cut.

    >>> left_out_text({"rows": 60, "pairs": 27, "dropped": {"too_long": 33}, "cut": 1, "shortened": 0})
    '27 of 60 rows are used; left out: 33 longer than max_length; 1 prompt lost its beginning to fit'
    >>> left_out_text({"rows": 60, "pairs": 60, "dropped": {}, "cut": 0, "shortened": 0})
    ''
    """
    parts = []
    if table["dropped"]:
        causes = ", ".join(f"{count:,} {_cause(name)}" for name, count in table["dropped"].items())
        parts.append(f"{table['pairs']:,} of {table['rows']:,} rows are used; left out: {causes}")
    parts += [pluralize(table[name], *words) for name, words in CUT.items() if table.get(name)]
    return "; ".join(parts)


def _cause(name: str) -> str:
    """Why rows are left out; a run of a newer version may have other causes."""
    return LEFT_OUT[name][0] if name in LEFT_OUT else name.replace("_", " ")


def data_notices(dataset: FederatedDataset) -> tuple[list[str], list[str]]:
    """Return notes on a dataset, and warnings. They name clients, but quote no pair."""
    counts, findings = dataset.row_counts, dataset.findings
    text = left_out_text(left_out_table(dataset))
    lost = sum(count for name, count in counts.left_out.items() if name not in _NO_LOSS)
    cut = counts.cut + counts.shortened
    much = lost > _MUCH * (counts.rows - counts.ties) or cut > _MUCH * counts.kept
    notes = [text] if text and not much else []
    warnings = [f"{text}{_worst(dataset)}{_remedies(counts)}"] if much else []
    if findings.ignored:
        notes.append(f"files not read: {listed(findings.ignored, str)}")
    if findings.unread:
        notes.append(unused_text(findings.unread))
    if findings.promptless:
        notes.append(f"{pluralize(findings.promptless, 'row has', 'rows have')} an empty prompt")
    if findings.implicit:
        who = pluralize(findings.implicit, "row has", "rows have")
        notes.append(f"{who} no column of prompts: the common beginning of both responses is the prompt")
    if findings.contradicted:
        who = pluralize(findings.contradicted, "row rates its", "rows rate their")
        warnings.append(
            f"{who} rejected response higher than the chosen one (by scores, or by a negative margin): check "
            "which one is preferred"
        )
    if findings.empty:
        warnings.append(f"files without rows: {listed(findings.empty, str)}")
    if findings.garbled:
        marks = [
            f"{_mark(text)} ({pluralize(count, 'pair', 'pairs')})" for text, count in findings.garbled.items()
        ]
        warnings.append(
            f"signs of a wrong encoding in the texts: {listed(marks, str)}; text of Windows read as Latin-1 "
            'has control characters (set encoding = "cp1252"), and UTF-8 read as Windows-1252 has Ã¼ for ü'
        )
    if findings.gone:
        who = pluralize(len(findings.gone), "client has", "clients have")
        warnings.append(f"{who} no training pairs left and cannot take part: {listed(findings.gone)}")
    more_notes, more_warnings = _encoding(counts)
    notes += more_notes
    warnings += more_warnings + _names(findings)
    single = [name for name in dataset.clients if dataset.sizes[name].train == 1]
    if single:
        who = pluralize(len(single), "client has", "clients have")
        warnings.append(f"{who} only one training pair: {listed(single)}")
    return notes, warnings


def _encoding(counts: RowCounts) -> tuple[list[str], list[str]]:
    """Return notes and warnings on how texts are encoded, see :data:`prefed.data.encoding.Note`."""
    notes, warnings = [], []
    if counts.control:
        warnings.append(
            f"{pluralize(counts.control, 'row contains', 'rows contain')} control tokens of the tokenizer, "
            "which are encoded as text: if a chat template has rendered these texts already, set [data] "
            'template = "rendered"'
        )
    if counts.ends:
        warnings.append(
            f"{pluralize(counts.ends, 'row has', 'rows have')} an end-of-text token before the end of a "
            "response: generation would stop there; remove it"
        )
    if counts.unlike:
        warnings.append(
            f"in {pluralize(counts.unlike, 'row', 'rows')}, the chat template renders the prompt differently "
            "with a response: these responses are used without the template's end of the turn"
        )
    # Code may continue at any character.
    glued = counts.glued if 2 * counts.glued > counts.rows else 0
    blank = "no blank separates the prompt from its response"
    if counts.plain:
        texts = pluralize(counts.plain, "prompt is a text", "prompts are texts")
        more = f", and {blank}" if glued else ""
        remedy = '[data] template = "chat" renders them as user turns'
        notes.append(f"{texts}, used without the model's chat template{more}: {remedy}")
    elif glued:
        notes.append(f"in {pluralize(glued, 'row', 'rows')}, {blank}: start responses with a space")
    return notes, warnings


def _mark(text: str) -> str:
    r"""Return characters as they are, a control character by its code point.

    >>> _mark("\x84"), _mark("Ã¼")
    ('U+0084', 'Ã¼')
    """
    return (
        text if text.isprintable() and text != "\ufffd" else " ".join(f"U+{ord(mark):04X}" for mark in text)
    )


def _worst(dataset: FederatedDataset, most: int = 3) -> str:
    shares = {}
    for name, lost in dataset.findings.lost.items():
        rows = lost + sum(dataset.sizes.get(name, ()))
        if lost > _MUCH * rows:
            shares[name] = (-lost / rows, name, f"{name!r} ({lost:,} of {rows:,})")
    worst = [text for *_, text in sorted(shares.values())]
    return f"; most affected clients: {listed(worst, str, most)}" if worst else ""


def _remedies(counts: RowCounts) -> str:
    whole = "; more for whole prompts" if counts.cut else ""
    needed = f" ({counts.needed:,} is enough for all pairs{whole})" if counts.needed else ""
    texts = [
        LEFT_OUT[name][1] + (needed if name == "too_long" else "")
        for name in counts.left_out
        if LEFT_OUT[name][1]
    ]
    if (counts.cut or counts.shortened) and "too_long" not in counts.left_out:
        texts.append("raise [data] max_length to avoid cuts")
    return f"; {'; '.join(texts)}" if texts else ""


def _names(findings: Findings) -> list[str]:
    """Warn of similar names that may mean one client, and of spaces around a name."""
    texts = [
        f"{listed(group, _visible(group))} count as different clients, but their names differ only in case, "
        "spaces or the encoding of a letter: use one spelling, or merge them with groups of the partition's "
        "column"
        for group in findings.similar
        if len(group) > 1
    ]
    blank = [name for (name, *others) in findings.similar if not others]
    return texts + ([f"names of clients with spaces around them: {listed(blank)}"] if blank else [])


def _visible(names: Sequence[str]) -> Callable[[str], str]:
    """Return how to print names: with escapes if two of them would look the same."""
    looks = {unicodedata.normalize("NFKC", name) for name in names}
    return repr if len(looks) == len(names) else ascii


def settings_warnings(data: DataConfig, batch: int, window: int | None, sizes: Sequence[float]) -> list[str]:
    """Warn of settings that do not fit the clients or the model.

    Args:
        batch: pairs per optimiser step.
        window: context length of the model in tokens; ``None`` without a limit.
        sizes: numbers of training pairs of the clients.
    """
    warnings = []
    default = DataConfig.model_fields["max_length"].default
    if window is not None and data.max_length > window and data.max_length != default:
        warnings.append(
            f"[data] max_length = {data.max_length:,} exceeds the model's context of {window:,} tokens: set "
            f"max_length = {window} to have longer pairs cut to this length"
        )
    most = max(sizes, default=batch)
    if batch > most:
        warnings.append(
            f"[method] batch_size: a step takes {batch:,} pairs, but no client has more than {most:,.0f}: "
            "each step uses all pairs of its client"
        )
    return warnings


def notices(experiment: Experiment, job: Job) -> tuple[list[str], list[str]]:
    """Return notes and warnings on the data and the settings of a run."""
    trainers = job.trainers
    assert isinstance(trainers, PairTrainerFactory)
    notes, warnings = data_notices(trainers.dataset)
    # The dataset has no clients of other machines.
    here = [size for client, size in job.weights.items() if client in trainers.dataset.clients]
    sizes = here or list(job.weights.values())
    batch = experiment.method.settings.step_pairs()
    notes += precision_notes(experiment.model)
    if today := experiment.data.today:
        notes.append(f"the chat template contains the date, which stays {today} in this run ([data] today)")
    return notes, warnings + settings_warnings(experiment.data, batch, trainers.backbone.window, sizes)


def announce(experiment: Experiment, job: Job, callback: Callback) -> None:
    """Report the :func:`notices` of a run to its callback."""
    notes, warnings = notices(experiment, job)
    for note in notes:
        callback.on_note(note)
    for warning in warnings:
        callback.on_warning(warning)
