"""Judges by name, those among them that come from a run."""

from __future__ import annotations

from pathlib import Path

from prefed import files
from prefed.judge import Judge
from prefed.judge.registry import JUDGES, JudgeOptions, split_name
from prefed.judge.utility import UtilityJudge, read_taste
from prefed.runs.loaded import LoadedRun, load_run
from prefed.runs.record import RunError


def make_judge(name: str, options: JudgeOptions, run: LoadedRun) -> Judge:
    """The judge of that name.

    Args:
        name: ``NAME`` or ``NAME:ARGUMENT``.
        run: the run whose model is judged. For the judge ``utility`` it is loaded with its data.

    Raises:
        ValueError: there is no such judge.
        JudgeError, ModelError, RunError: it lacks what it needs.
    """
    kind, argument = split_name(name)
    if kind == "utility":
        return _utility(options.taste, run)
    if kind == "selector":
        return _selector(Path(argument), run)
    return JUDGES[kind](argument, options)


def _utility(taste: str, run: LoadedRun) -> Judge:
    dataset = run.trainers.dataset
    records = (dataset.tokens.record(row) for row in range(len(dataset.tokens)))
    return UtilityJudge(read_taste(taste, records, dataset.flipped))


def _selector(path: Path, judged: LoadedRun) -> Judge:
    from prefed.judge.selector import SelectorJudge

    run = judged if path.resolve() == judged.record.path.resolve() else load_run(path)
    if run.method.reads != "choice":
        raise RunError(f"--judge selector: {path} is a run of {run.method.name}, which trains no selectors")
    published = run.method.publish(run.server, run.clients[0])
    selectors = run.job.shared_models(published)
    experiment = run.experiment
    digests = {name: files.digest(t.flat.cpu().numpy().tobytes()) for name, t in selectors.items()}
    return SelectorJudge(
        run.backbone,
        selectors,
        experiment.selector,
        max_length=experiment.data.max_length,
        identity={
            "model": run.trainers.fingerprint["model"],
            "selectors": digests,
            **experiment.selector.model_dump(),
            "max_length": experiment.data.max_length,
        },
        max_tokens=experiment.engine.max_tokens,
        fast=experiment.model.fast,
    )
