"""Let a judge compare the responses of a run's model with those of another model, or with reference answers.

::

    RUN/judge/texts/…                   responses: one file per model, prompts and sampling
    RUN/judge/NAME/settings.json        the models, the sampling and the judge
    RUN/judge/NAME/verdicts.jsonl       one row per prompt: both texts, both verdicts in the judge's words
    RUN/judge/NAME/summary.json         the win rates
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefed.align.judge import Judge, Question, Verdict, outcome
from prefed.align.judge.local import MEAN
from prefed.align.judge.names import split_name
from prefed.align.judge.questions import NumberedPrompt, numbered_prompts, references
from prefed.config import EndpointConfig
from prefed.config.align import JudgeOptions
from prefed.core import files
from prefed.core.records import Judged, VerdictRow, WinRates
from prefed.core.strict_settings import differing
from prefed.core.text import pluralize
from prefed.data.record import plain_prompt
from prefed.runs.append_log import Journal
from prefed.runs.exports_log import record_copy
from prefed.runs.finished_run import RunError
from prefed.runs.labels import make_judge
from prefed.runs.loaded_run import LoadedRun, load_run
from prefed.runs.responses import Models, ModelSide, Progress, References, Side, responder, slug
from prefed.runs.tastes import needs_pairs
from prefed.runs.track import log_verdicts
from prefed.train.generation import Sampling
from prefed.train.metrics.winrate import NothingJudgedError, length_controlled, win_rate

SETTINGS = "settings.json"
SAME = "the texts are equal, so the judge was not asked"


@dataclass(frozen=True)
class Comparison:
    """The settings of a comparison. By default, the other side is the base model.

    Attributes:
        judge: ``NAME`` or ``NAME:ARGUMENT``, see :data:`~prefed.align.judge.names.ARGUMENTS`.
        other: compare with the model of this run.
        reference: compare with the reference answers in this file.
        column: the column of the reference answers.
        client: use the personal model of this client, in both runs if there are two.
        against_shared: compare the client's personal model with the shared one.
        taste: use the aligned model with this taste, a name as in :mod:`prefed.runs.tastes`; also in the
            other run if its model takes one.
        prompt_column: the column of the prompts; defaults to ``prompt``, or the prompt of preference pairs.
        raw: use prompts unchanged.
        sampling: for the responses.
        seed: for the responses.
        options: for the judge.
        servers: servers that generate the responses: of the run's model, and of the other model if there are
            two. Each must serve that model.
        name: the name of the folder; by default made from the judge, its taste and both sides.

    Raises:
        ValueError: attributes contradict each other, or there is no such judge.
    """

    judge: str
    prompts: Path
    other: Path | None = None
    reference: Path | None = None
    column: str | None = None
    client: str | None = None
    against_shared: bool = False
    taste: str | None = None
    prompt_column: str | None = None
    raw: bool = False
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    seed: int = 0
    options: JudgeOptions = field(default_factory=JudgeOptions)
    servers: Sequence[EndpointConfig] = ()
    name: str | None = None

    def __post_init__(self) -> None:
        split_name(self.judge)
        if (self.other is not None) + (self.reference is not None) + self.against_shared > 1:
            raise ValueError(
                "a second run, --against FILE and --against-shared exclude each other: use one of them"
            )
        if (self.reference is None) != (self.column is None):
            raise ValueError("use --against FILE and --column NAME together: the column has the answers")
        if self.against_shared and self.client is None and self.taste is None:
            raise ValueError("--against-shared needs --client ID, the client with the personal model")
        if len(self.servers) > (2 if self.reference is None else 1):
            raise ValueError("give --responses at most once for each model that generates responses")
        if self.name is not None and (slug(self.name) != self.name or self.name in ("texts", ".", "..")):
            raise ValueError(
                f"--name {self.name!r}: use only letters, digits, dots and hyphens, and not the name 'texts'"
            )

    @property
    def names_a_client(self) -> bool:
        """Whether a client's personal model or taste is used, by a model or by the judge."""
        return self.client is not None or self.taste is not None or self.options.taste != "mean"


def judge(path: str | Path, how: Comparison, progress: Progress = lambda what, done, of: None) -> Judged:
    """Compare the model of a run, and write verdicts and win rates under ``RUN/judge``.

    An interrupted comparison continues when it is called again: responses and verdicts in the files are kept,
    and only pending questions are asked again.

    Returns:
        The content of ``summary.json``.

    Raises:
        ValueError: the prompts or the references cannot be used, or nothing was judged.
        RunError: there is no such run, model or client, or the folder has verdicts of another comparison.
        ModelError, JudgeError: a model or the judge cannot be used.
    """
    run = load_run(path, data=split_name(how.judge)[0] == "utility" or needs_pairs(how.taste))
    data = run.experiment.data
    prompts = numbered_prompts(how.prompts, how.prompt_column, data.encoding, data.format)
    sides = own, other = _sides(run, how, prompts)
    for side, server in zip(sides, how.servers, strict=False):
        assert isinstance(side, ModelSide)
        responder(server)
        side.server = server
    judge = make_judge(how.judge, how.options, run)
    base = run.record.path / "judge"
    texts = base / "texts"
    # Judges without tastes ignore this option.
    taste = None if how.options.taste == MEAN or "taste" not in judge.identity else how.options.taste
    settings = {"judge": how.judge, **judge.identity, "model": own.name, "against": other.name}
    settings |= {"client": how.client, "texts": None, "responses": _responses(how, prompts)}
    served = {
        side.name: side.served["server"] for side in sides if isinstance(side, ModelSide) and side.server
    }
    if served:
        settings["servers"] = {**served, "bit_reproducible": False}
    folder = base / how.name if how.name else _folder(base, settings, taste)
    _check_settings(folder, settings)
    own_texts, other_texts = (side.texts(prompts, texts, progress) for side in (own, other))
    pairs = [
        (row, Question(row.prompt, own_texts[row.row], other_texts[row.row], row.extra))
        for row in prompts
        if row.row in own_texts and row.row in other_texts
    ]
    settings["texts"] = _digest(pairs)
    _check_settings(folder, settings)
    files.private_folder(folder)
    settings_file = json.dumps(settings, indent=2, ensure_ascii=False).encode()
    files.write(folder / SETTINGS, settings_file, mode=0o600)
    with Journal(folder / "verdicts.jsonl") as journal:
        for verdict in _verdicts(judge, pairs, journal):
            journal.append([verdict])
            progress("verdicts", len(journal.rows), len(pairs))
        verdicts = [journal.rows[row.row] for row, _ in pairs]
    rates = summarize(verdicts, len(prompts) - len(pairs), how)
    for name, server in served.items():
        text = f"responses of {name} are from {server['model']} at {server['url']}, not bit-reproducible"
        rates["note"] = "; ".join(filter(None, (rates["note"], text)))
    summary: Judged = {
        "name": folder.name,
        "judge": how.judge,
        "taste": taste,
        "model": own.name,
        "against": other.name,
        "round": run.reader.commit.round,
        **rates,
    }
    files.write(
        folder / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False).encode(), mode=0o600
    )
    if how.other is not None:
        record_copy(how.other, "judgement", folder)
    track = run.experiment.track
    if track is not None and (track.clients or not how.names_a_client):
        log_verdicts(track, run.record.path, run.record.summary["rounds"], summary)
    return summary


def summarize(verdicts: Sequence[Mapping[str, Any]], left_out: int, how: Comparison) -> WinRates:
    """Compute win rates from rows of ``verdicts.jsonl``.

    Args:
        left_out: number of prompts that fill the context of a model.

    Raises:
        NothingJudgedError: no question to the judge has an outcome; the message quotes the first failure.
    """
    outcomes = [row["outcome"] for row in verdicts]
    asked = [row["outcome"] for row in verdicts if row["first"]["words"] != SAME]
    # Equal texts are ties without a judge. If all questions failed, these ties do not make a rate.
    unjudged = bool(asked) and all(outcome is None for outcome in asked)
    # A prompt is a text or a list of messages.
    prompts = [json.dumps(row["prompt"], sort_keys=True) for row in verdicts]
    try:
        rate = win_rate(asked) if unjudged else win_rate(outcomes, prompts)
    except NothingJudgedError as error:
        answers = (row[order] for row in verdicts for order in ("first", "second"))
        words = [answer["words"] for answer in answers if answer["preference"] is None]
        quoted = (
            f"; the first failure: {words[0][:300]}"
            if words
            else "; no prompt leaves room for a response in the model's context"
        )
        raise NothingJudgedError(f"{error}{quoted}") from error
    lengths = [(len(row["text"]), len(row["against"])) for row in verdicts]
    controlled = length_controlled(outcomes, lengths)
    notes = [controlled.note]
    if rate.failed:
        failed = pluralize(rate.failed, "prompt has", "prompts have")
        notes.append(f"{failed} no usable verdict and no effect on the rates; see verdicts.jsonl")
    if left_out:
        long = pluralize(left_out, "prompt is", "prompts are")
        notes.append(f"{long} left out: no room for a response in the model's context")
    if rate.distinct < rate.judged:
        distinct = pluralize(rate.distinct, "distinct prompt was", "distinct prompts were")
        notes.append(f"{distinct} judged; the interval accounts for repeated prompts")
    return {
        "prompts": len(verdicts) + left_out,
        "win_rate": {"mean": rate.mean, "low": rate.low, "high": rate.high},
        "wins": rate.wins,
        "length_controlled": controlled.rate,
        "ties": rate.ties,
        "judged": rate.judged,
        "failed": rate.failed,
        "left_out": left_out,
        "note": "; ".join(notes),
    }


def _sides(run: LoadedRun, how: Comparison, prompts: Sequence[NumberedPrompt]) -> tuple[Side, Side]:
    models = Models(run, how.sampling, seed=how.seed, raw=how.raw)
    own = models.own(how.client, how.taste)
    if how.reference is not None:
        assert how.column is not None
        answers = references(
            how.reference, how.column, prompts, how.prompt_column, run.experiment.data.encoding
        )
        return own, References(f"{how.reference.name}, {how.column}", answers)
    if how.other is not None:
        other_run = load_run(how.other, data=needs_pairs(how.taste))
        others = Models(other_run, how.sampling, seed=how.seed, raw=how.raw)
        plain = how.taste is not None and not others.takes_tastes
        other = others.own(None) if plain else others.own(how.client, how.taste)
        if other.name == own.name:
            other.name = str(how.other)
        return own, other
    if how.against_shared:
        return own, models.own(None) if how.client is None else models.shared(how.client)
    return own, models.base()


def _verdicts(
    judge: Judge, pairs: Sequence[tuple[NumberedPrompt, Question]], journal: Journal
) -> Iterator[VerdictRow]:
    """Yield a row of ``verdicts.jsonl`` for each pair without one, as soon as it is judged."""
    asked = []
    for row, question in pairs:
        if row.row in journal.rows:
            continue
        if question.first.strip() == question.second.strip():
            tie = Verdict(0.5, SAME)
            yield _row(row, question, tie, tie)
        else:
            asked.append((row, question))
    orders = (order for _, question in asked for order in (question, question.swapped()))
    answers = iter(judge.compare(orders))
    for row, question in asked:
        yield _row(row, question, next(answers), next(answers))


def _row(row: NumberedPrompt, question: Question, first: Verdict, second: Verdict) -> VerdictRow:
    result = outcome(first, second)
    return {
        "row": row.row,
        "prompt": plain_prompt(row.prompt),
        "text": question.first,
        "against": question.second,
        "outcome": result,
        "result": {1.0: "win", 0.5: "tie", 0.0: "loss", None: "failed"}[result],
        "first": {"preference": first.preference, "words": first.text},
        "second": {
            "preference": None if second.preference is None else 1 - second.preference,
            "words": second.text,
        },
    }


def _digest(pairs: Sequence[tuple[NumberedPrompt, Question]]) -> str:
    texts = [[row.row, repr(question.prompt), question.first, question.second] for row, question in pairs]
    return files.digest(json.dumps(texts).encode())


def _responses(how: Comparison, prompts: Sequence[NumberedPrompt]) -> dict[str, Any]:
    texts = json.dumps([[row.row, repr(row.prompt)] for row in prompts]).encode()
    sampling = how.sampling.model_dump()
    drawn = {"seed": how.seed} if how.sampling.temperature else {}
    asked = f"{pluralize(len(prompts), 'prompt', 'prompts')}, {files.digest(texts)}"
    sampling["max_new_tokens"] = sampling.pop("max_tokens")
    return {**sampling, **drawn, "raw": how.raw, "prompts": asked}


def _folder(base: Path, settings: Mapping[str, Any], taste: str | None) -> Path:
    judge, sides = settings["judge"], f"{settings['model']} against {settings['against']}"
    return base / slug(f"{judge} {sides}" if taste is None else f"{judge}, taste {taste} {sides}")


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that an earlier comparison in ``folder`` has the same settings."""
    path = folder / SETTINGS
    if not path.exists():
        return
    try:
        stored = json.loads(path.read_text("utf-8"))
        texts = settings["texts"] or stored.get("texts")
        changed = differing(stored, {**settings, "texts": texts})
    except (ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is damaged ({error}); delete the folder, or choose another --name") from error
    if changed:
        lines = [f"  {name}: {before!r} → {after!r}" for name, (before, after) in changed.items()]
        raise RunError(
            f"{folder} has verdicts of another comparison (stored → given):\n"
            + "\n".join(lines)
            + "\nchoose another --name, or delete the folder"
        )
