"""Labels for the pairs of an alignment, from the selectors of a run or from a judge; and judges of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prefed.align import Selectors
from prefed.align.judge import Judge, Question, Verdict, outcome
from prefed.align.judge.endpoint import EndpointJudge
from prefed.align.judge.local import LocalJudge, RewardJudge, UtilityJudge, read_taste
from prefed.align.judge.names import split_name
from prefed.align.judge.people import PeopleJudge
from prefed.align.judge.questions import blocks, by_score
from prefed.config.align import JudgeOptions
from prefed.core import files
from prefed.core.plugins import Registry
from prefed.data import FederatedDataset, Record
from prefed.methods import METHODS
from prefed.methods.base.tastes import Z
from prefed.runs.build import response_encoder
from prefed.runs.exports_log import record_copy
from prefed.runs.finished_run import RunError, RunRecord
from prefed.runs.loaded_run import LoadedRun, load_run, recorded_experiment
from prefed.runs.tastes import published_taste
from prefed.train.metrics import majority


def check_selectors(record: RunRecord) -> None:
    """Check that the method of a run trains selectors.

    Raises:
        RunError: it does not.
    """
    kind = METHODS.builtin.get(record.method) or recorded_experiment(record).method.kind
    if kind.reads != "choice":
        named = " or ".join(name for name, kind in METHODS.builtin.items() if kind.reads == "choice")
        raise RunError(
            f"{record.path}: method {record.method} trains no selectors, which are needed to label "
            f"completions; use a run of {named}"
        )


def selectors_of(run: LoadedRun, taste: str | None = None) -> Selectors:
    """Return the last published selectors of a run.

    Args:
        taste: a name for :func:`prefed.runs.tastes.published_taste`; ``None`` for the published taste, or for
            selectors without tastes.

    Raises:
        RunError: the server knows no such taste.
    """
    # Every client gets all selectors.
    published = run.method.publish(run.server, run.job.members[0])
    models = run.job.shared_models(published)
    if taste is not None:
        z = published_taste(run, taste)
        models = {name: model.replace({Z: z}) for name, model in models.items()}
    return Selectors(
        run.backbone,
        models,
        run.experiment.selector,
        run.experiment.data.max_length,
        run.experiment.engine.max_tokens,
        run.experiment.model.fast,
        response_encoder(run.experiment, run.backbone),
    )


def untrained(run: LoadedRun) -> Iterator[str]:
    """Return the names of the selectors that have their initial values."""
    start = run.method.init_server(run.trainers.initial)
    models = run.job.shared_models(run.method.publish(start, run.job.members[0]))
    return (name for name, model in run.published_models.items() if model.equal(models[name]))


BLOCK = 64
"""Questions that are tokenised together."""
JUDGES: Registry[Callable[[str, JudgeOptions], Judge]] = Registry(
    "judges",
    {"reward": RewardJudge, "endpoint": EndpointJudge, "local": LocalJudge, "people": PeopleJudge},
    "JUDGE",
)
"""Name → class of the judges that need no run."""


def make_judge(name: str, options: JudgeOptions, run: LoadedRun) -> Judge:
    """Make a judge of a run's model from its name.

    Args:
        run: the run of the judged model; loaded with its data for the judge ``utility``.

    Raises:
        ValueError, JudgeError, ModelError, RunError: as :func:`judge_over`.
    """
    return judge_over(name, options, run.trainers.dataset, run.record.path, run)


def judge_over(
    name: str, options: JudgeOptions, dataset: FederatedDataset, place: Path, run: LoadedRun | None = None
) -> Judge:
    """Make a judge from its name.

    Args:
        name: ``NAME`` or ``NAME:ARGUMENT``.
        dataset: has the tastes for the judge ``utility``.
        place: the directory of the run whose model is judged.
        run: this run, if it is loaded.

    Raises:
        ValueError: there is no such judge.
        JudgeError, ModelError, RunError: its model or its taste cannot be used.
    """
    kind, argument = split_name(name)
    if kind == "utility":
        return _utility(options.taste, dataset)
    if kind == "selector":
        return _selector(Path(argument), options.taste, place, run)
    if kind not in JUDGES:
        raise ValueError(f"no judge is called {kind!r}{JUDGES.hint(kind)}")
    return JUDGES[kind](argument, options)


def _utility(taste: str, dataset: FederatedDataset) -> Judge:
    records = (dataset.tokens.record(row) for row in range(len(dataset.tokens)))
    return UtilityJudge(read_taste(taste, records, dataset.flipped))


def _selector(path: Path, taste: str, place: Path, judged: LoadedRun | None) -> Judge:
    run = judged if judged and path.resolve() == place.resolve() else load_run(path)
    check_selectors(run.record)
    record_copy(path, "judgement", place)
    named = taste != "mean" and run.method.tastes
    selectors = selectors_of(run, taste if named else None)
    models = {name: files.digest(t.flat.cpu().numpy().tobytes()) for name, t in selectors.models.items()}
    identity = {
        "model": run.trainers.fingerprint["model"],
        "selectors": models,
        **selectors.config.model_dump(),
        "max_length": selectors.max_length,
        **({"taste": taste} if named else {}),
    }
    return SelectorJudge(selectors, identity)


class SelectorJudge:
    """Judges by the majority of selectors; the sum of their scores breaks ties.

    Scores are symmetrised over both orders, so verdicts do not depend on the order of a question.
    """

    def __init__(self, selectors: Selectors, identity: Mapping[str, Any]) -> None:
        self._selectors, self.identity = selectors, identity

    def compare(self, questions: Iterable[Question]) -> Iterator[Verdict]:
        """Yield a verdict for every question, block by block; both orders of a question are scored once.

        Raises:
            AlignError: a score of a selector is not finite.
        """
        for block in blocks(questions, BLOCK):
            pairs = {_pair(question): _record(question) for question in block}
            scores = self._scores({key: pair for key, pair in pairs.items() if isinstance(pair, Record)})
            for question in block:
                key = _pair(question)
                pair, own = pairs[key], scores.get(key)
                if not isinstance(pair, Record):
                    yield Verdict(None, pair)
                elif own is None:
                    yield Verdict(None, "the pair exceeds [data] max_length of the selectors")
                else:
                    yield self._verdict(own if pair.chosen == question.first else -own)

    def _scores(self, pairs: Mapping[Any, Record]) -> dict[Any, npt.NDArray[np.float32]]:
        """Return scores of chosen over rejected, ``[U]``, for each pair that is not too long."""
        keys = list(pairs)
        asked, scores = self._selectors.scores(list(pairs.values()))
        return {keys[number]: own for number, own in zip(asked, scores.T, strict=True)}

    def _verdict(self, scores: npt.NDArray[np.float32]) -> Verdict:
        words = (f"{name} {value:+.4f}" for name, value in zip(self._selectors.models, scores, strict=True))
        lead = float(majority(scores[:, None])[0])
        return by_score(lead, 0.0, f"log-odds of the first: {', '.join(words)}")


@dataclass(frozen=True)
class JudgeLabels:
    """Labels the pairs of an alignment with a judge."""

    judge: Judge

    def scores(
        self, pairs: Sequence[Record], tastes: torch.Tensor | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Ask the judge about pairs in both orders.

        Args:
            tastes: ignored.

        Returns:
            Indices of the pairs with two usable verdicts, ``[n]``, and their scores, ``[1, n]``: 1 if both
            verdicts prefer the chosen response, −1 if both prefer the rejected one, else 0.

        Raises:
            JudgeError: the judge cannot answer any question.
        """
        questions = [Question(pair.prompt, pair.chosen, pair.rejected, pair.extra) for pair in pairs]
        answers = iter(self.judge.compare(q for each in questions for q in (each, each.swapped())))
        outcomes = [outcome(next(answers), next(answers)) for _ in questions]
        usable = {number: value for number, value in enumerate(outcomes) if value is not None}
        asked = np.fromiter(usable, np.int64)
        return asked, np.array([[2 * value - 1 for value in usable.values()]], np.float32)


@dataclass(frozen=True)
class ClientVotes:
    """Labels the pairs of an alignment with the votes of clients.

    Attributes:
        judges: what each client judges with.
    """

    judges: Sequence[JudgeLabels]

    def scores(
        self, pairs: Sequence[Record], tastes: torch.Tensor | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the votes ``[U, n]`` on all pairs as scores of :class:`JudgeLabels`, 0 without a verdict."""
        votes = np.zeros((len(self.judges), len(pairs)), np.float32)
        # Clients may share a judge, which is asked once.
        answers = {
            key: judge.scores(pairs) for key, judge in {id(each): each for each in self.judges}.items()
        }
        for own, judge in zip(votes, self.judges, strict=True):
            asked, scores = answers[id(judge)]
            own[asked] = scores[0]
        return np.arange(len(pairs)), votes


def _pair(question: Question) -> Any:
    return question.prompt, frozenset((question.first, question.second))


def _record(question: Question) -> Record | str:
    """Convert a question to a pair; returns the reason if that fails."""
    try:
        return Record(question.prompt, question.first, question.second, extra=question.fields)
    except ValueError as error:
        return f"selectors cannot score this pair: {error}"
