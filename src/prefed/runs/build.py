"""Build the job of an experiment from its data, model and method, in this or another process."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from prefed.config import ConfigError, Experiment, to_toml
from prefed.config.file import allow_code, code_names, parse_toml
from prefed.core import Key, Owner, files, plugins
from prefed.core.strict_settings import flatten
from prefed.core.text import did_you_mean, pluralize, timed
from prefed.data import FederatedDataset, SelectorConfig, Template, build_dataset
from prefed.engines import JobFactory
from prefed.engines.job import Job, JobError
from prefed.merge import Aggregator, TooFewUploads
from prefed.merge.rules import check_upload_count
from prefed.methods import TrainingSettings, base, to_neighbours
from prefed.methods.base import ClusterSettings
from prefed.methods.base.settings import BaselineSettings
from prefed.models import Backbone, load_backbone, load_tokenizer
from prefed.models.pretrained import with_dtype
from prefed.models.trainable_parts import EXAMPLES
from prefed.runs.reference_cache import features_folder, reference_folder
from prefed.train.losses import OBJECTIVES, check_feedback
from prefed.train.pair_trainer import PairTrainerFactory

if TYPE_CHECKING:
    from prefed.data.examples import ExampleEncoder
    from prefed.data.response_encoder import ResponseEncoder
    from prefed.data.show import ShownClient
    from prefed.engines.diagnostics import Diagnostics
    from prefed.train.lockstep import Lockstep

_log = logging.getLogger("prefed")

PROMPTS = 10
"""Held-out prompts that a model with a chat template answers where ``[evaluate] text`` is not set."""


def build_data(experiment: Experiment, folder: Path) -> FederatedDataset:
    """Read and tokenise the data of an experiment into ``folder``, or open the tokens there.

    Raises:
        DataError: the data cannot be used.
        ModelError: the tokenizer of the model cannot be loaded.
    """
    tokenizer = load_tokenizer(experiment.model)
    key = Key(experiment.seed).at("data")
    with timed("data"):
        dataset = build_dataset(experiment.data, tokenizer, key, folder, selector_settings(experiment))
    pairs = sum(sizes.train for sizes in dataset.sizes.values())
    _log.info("%s clients have %s training pairs", f"{len(dataset.sizes):,}", f"{pairs:,}")
    return dataset


def first_pairs(experiment: Experiment, dataset: FederatedDataset, count: int) -> list[ShownClient]:
    """Return the first training pairs of each client as they are trained on; see :mod:`prefed.data.show`."""
    from prefed.data import show

    loss = OBJECTIVES.get(experiment.method.settings.goal().name)
    return show.first_pairs(
        dataset,
        count,
        experiment.data,
        load_tokenizer(experiment.model),
        selector_settings(experiment),
        rejected=loss is None or loss.needs_rejected,
    )


def selector_settings(experiment: Experiment) -> SelectorConfig | None:
    """Return the settings of the selectors; ``None`` if the method trains policies."""
    return experiment.selector if experiment.method.kind.reads == "choice" else None


def answered_prompts(experiment: Experiment, tokenizer: Any) -> int:
    """Return the number of held-out prompts that the models of a run answer at its end."""
    kind = experiment.method.kind
    if kind.reads == "choice" or EXAMPLES in kind.needs(experiment.method.settings):
        return 0
    if experiment.evaluate.text is not None:
        return experiment.evaluate.text
    return PROMPTS if Template(tokenizer, experiment.data.template).chat else 0


def of_parent(experiment: Experiment) -> Experiment:
    """Return the experiment for a process whose workers train and evaluate: its model is on the CPU.

    The process needs weights only for their digest and to save adapters, so GPUs are left to the workers. It
    uses the device all the same if it writes answers or infers tastes, and for float16 and 4-bit weights,
    which are not the same on a CPU.
    """
    engine, model = experiment.engine, with_dtype(experiment.model)
    busy = experiment.report is not None or "latent" in experiment.parts
    if engine.backend == "in_process" or busy:
        return experiment
    if experiment.evaluate.text != 0 and answered_prompts(experiment, load_tokenizer(model)):
        return experiment
    if model.quantize is not None or model.dtype == "float16":
        return experiment
    return experiment.model_copy(
        update={"model": model.model_copy(update={"device": "cpu", "gpus": 1, "kernels": None})}
    )


def build_job(experiment: Experiment, folder: Path) -> Job:
    """Load the data and the model, and build the method.

    Args:
        folder: cache of tokens, and of reference log-probabilities unless runs share them.

    Raises:
        DataError, ModelError: the data or the model cannot be used.
        ConfigError: every client would be unseen, the cohort is too small for the merge rule, or the clients
            do not fit the settings.
    """
    files.private_folder(folder)
    dataset = build_data(experiment, folder / "data")
    _check_ranks(experiment, dataset.clients)
    caches = reference_folder(experiment, folder), features_folder(experiment, folder)
    job = assemble_job(experiment, build_trainers(experiment, dataset, *caches))
    warn_of_like_selectors(experiment, job)
    return job


def build_trainers(
    experiment: Experiment, dataset: FederatedDataset, cache: Path | None, features: Path | None = None
) -> PairTrainerFactory:
    """Load the model of an experiment, with the parts that its method needs.

    Args:
        cache: folder for reference log-probabilities; ``None`` keeps them in memory.
        features: folder for hidden states; defaults to ``cache``.

    Raises:
        ModelError: the model cannot be used.
        ConfigError: every client would be unseen, or the objective cannot train on the data.
    """
    settings = experiment.method.settings
    ppo = settings if isinstance(settings, BaselineSettings) and settings.ppo else None
    trained = next((data.train for data in dataset.clients.values()), None)
    if dataset.has_pairs and trained is not None:
        try:
            named = "objective" in type(settings).model_fields
            what = f"objective {settings.goal().name!r}" if named else experiment.method.name
            check_feedback(what, settings.feedback, dataset.tokens, trained)
        except ValueError as error:
            raise ConfigError(f"[method] {error}") from error
    with timed("model", experiment.model.name):
        backbone = load_backbone(experiment.model, Key(experiment.seed).at("model"), experiment.parts)
    return PairTrainerFactory(
        backbone,
        dataset,
        cache=cache,
        features=features or cache,
        max_tokens=experiment.engine.max_tokens,
        fast=experiment.model.fast,
        unseen=unseen_clients(experiment, dataset),
        reward_model=ppo.reward_model if ppo else None,
        responses=response_encoder(experiment, backbone),
        examples=example_encoder(experiment, backbone),
        feedback=settings.feedback,
    )


def unseen_clients(experiment: Experiment, dataset: FederatedDataset) -> tuple[str, ...]:
    """Return the clients that never train: those named in the settings, or a number drawn with the seed."""
    unseen, names = experiment.evaluate.unseen, sorted(dataset.clients)
    if not isinstance(unseen, int):
        return tuple(sorted({*unseen} - {*experiment.data.exclude}))
    if unseen >= len(names):
        raise ConfigError(f"[evaluate] unseen = {unseen}, but there are only {len(names)} clients; lower it")
    draw = Key(experiment.seed).at("unseen").numpy().choice(len(names), unseen, replace=False)
    return tuple(names[index] for index in sorted(draw))


def absent_clients(experiment: Experiment, dataset: FederatedDataset) -> tuple[str, ...]:
    """Return the excluded clients that would train; a number of unseen clients is drawn without them."""
    unseen = experiment.evaluate.unseen
    others = {*dataset.clients, *(() if isinstance(unseen, int) else unseen)}
    return tuple(sorted({*experiment.data.exclude} - others))


def example_encoder(experiment: Experiment, backbone: Backbone) -> ExampleEncoder | None:
    """Return the encoder of examples for a method that judges with them; ``None`` for other methods."""
    if EXAMPLES not in backbone.needs:
        return None
    from prefed.data.examples import ExampleEncoder

    return ExampleEncoder(*_format(experiment, backbone), Key(experiment.seed).at(EXAMPLES))


def response_encoder(experiment: Experiment, backbone: Backbone) -> ResponseEncoder | None:
    """Return the encoder of responses for a model that reads hidden states; ``None`` for other models."""
    if not backbone.needs & {"latent", "mixture"}:
        return None
    from prefed.data.response_encoder import ResponseEncoder

    return ResponseEncoder(*_format(experiment, backbone))


def _format(experiment: Experiment, backbone: Backbone) -> tuple[Any, Template, int]:
    """Return the tokenizer, the template, and the maximum number of tokens of the model or the data."""
    data, tokenizer = experiment.data, backbone.tokenizer
    most = min(data.max_length, backbone.window or data.max_length)
    return tokenizer, Template.of(tokenizer, data), most


_KEYS = {
    "method": ("[method]", "or choose another method"),
    "cohort": ("[cohort] size", "lower it, or leave out [cohort] to use all clients"),
    "unseen": ("[evaluate] unseen", "name clients in the data"),
    "split": ("[evaluate] split", "set data.{split}_fraction or data.{split}, or choose another split"),
    "privacy": ("[privacy]", "lower it, or set data.{split}_fraction or data.{split} to get more pairs"),
    "stop": ("[stop]", "set data.validation_fraction or data.validation, or leave out [stop]"),
    "graph": ("[graph]", "leave out [cohort] and [fleet]"),
    "diagnostics": ("[evaluate] diagnose", "leave it out"),
    "fleet": ("[fleet]", "use server = 'synchronous' and max_delay = 0"),
}
"""Field of a job → its key in an experiment file, and the remedy if its value is rejected."""


def config_error(error: JobError, unplaced: int = 0) -> ConfigError:
    """Convert the error of a job to one that names the key in the experiment file.

    Args:
        unplaced: number of held-out rows without a training client.
    """
    key, remedy = _KEYS[error.field]
    if error.field == "split" and unplaced:
        rows = pluralize(unplaced, "held-out row belongs", "held-out rows belong")
        remedy = f"{rows} to no client with training pairs: use the same clients' names, or set another split"
    return ConfigError(f"{key} {error.problem}; {remedy.format(split=error.split)}")


def assemble_job(experiment: Experiment, trainers: PairTrainerFactory) -> Job:
    """Build the method of an experiment, and its job with the trainers of :func:`build_trainers`.

    Raises:
        ConfigError: as :func:`build_job`.
    """
    settings, evaluate, backbone = experiment.method.settings, experiment.evaluate, trainers.backbone
    aggregator = Aggregator(experiment.whole_merge, backbone.layout, backbone.scaling)
    method = experiment.method.kind.build(settings, backbone.layout, aggregator, experiment.rounds)
    graph = experiment.whole_graph
    if graph is not None and method.exchanges[0].to != "neighbours":
        method = to_neighbours(method, settings, experiment.merge)
    if ranks := experiment.merge.ranks:
        method = base.with_ranks(method, ranks, backbone.layout)
    unseen = unseen_clients(experiment, trainers.dataset)
    try:
        job = Job(
            trainers=trainers,
            method=method,
            seed=experiment.seed,
            rounds=experiment.rounds,
            cohort=experiment.cohort,
            evaluate=evaluate,
            beta=evaluate.beta or float(getattr(settings, "beta", 0.1)),
            state_dtype=getattr(torch, experiment.engine.state_dtype),
            unseen=unseen,
            absent=absent_clients(experiment, trainers.dataset),
            untouched=backbone.reference,
            privacy=experiment.privacy,
            fleet=experiment.fleet,
            work=_work(settings, trainers, unseen),
            graph=graph,
            diagnostics=_diagnostics(experiment),
            stop=experiment.stop,
            feedback=settings.feedback,
        )
    except JobError as error:
        raise config_error(error, trainers.dataset.row_counts.unplaced) from error
    _check_cohort(experiment, job)
    return job


def _check_ranks(experiment: Experiment, clients: Collection[str]) -> None:
    """Check that ``[merge] ranks`` names clients of the experiment."""
    if unknown := sorted(experiment.merge.ranks.keys() - {*clients, *experiment.data.exclude}):
        hint = did_you_mean(unknown[0], clients)
        raise ConfigError(f"[merge] ranks: no client is called {unknown[0]!r}{hint}")


def _diagnostics(experiment: Experiment) -> Diagnostics | None:
    """Return the diagnostics that ``[evaluate]`` asks for.

    Raises:
        ConfigError: the objective has no gradient on given pairs.
    """
    evaluate, settings = experiment.evaluate, experiment.method.settings
    if evaluate.diagnose is None:
        return None
    goal = settings.goal()
    if goal.name == "ppo":
        raise ConfigError("[evaluate] diagnose: objective 'ppo' has no gradient on given pairs; leave it out")
    uniform = experiment.whole_graph is not None or experiment.merge.weights == "uniform"
    from prefed.engines.diagnostics import Diagnostics

    return Diagnostics(evaluate.diagnose, evaluate.diagnostic_pairs, goal, settings.step_pairs(), uniform)


def _work(
    settings: TrainingSettings, trainers: PairTrainerFactory, unseen: Sequence[str]
) -> dict[str, float] | None:
    """Return client → work of a visit relative to the mean; ``None`` if all visits have equal steps."""
    if settings.local_epochs is None:
        return None
    sizes = {c: size.train for c, size in trainers.clients.items() if size.train and c not in unseen}
    mean = sum(sizes.values()) / max(len(sizes), 1)
    return {client: size / mean for client, size in sizes.items()}


def _check_cohort(experiment: Experiment, job: Job) -> None:
    merge, size = experiment.merge, job.cohort_size
    if not job.method.ownership.names(Owner.SHARED):
        return
    try:
        check_upload_count(merge.rule, size, liars=merge.liars, trim=merge.trim)
    except TooFewUploads as error:
        raise ConfigError(
            f"[merge] rule = {merge.rule!r} cannot merge a cohort of {size} clients ([cohort] size; "
            f"{len(job.members)} clients train): {error}"
        ) from error


def warn_of_like_selectors(experiment: Experiment, job: Job) -> None:
    """Warn if all selectors of FedBiscuit train on the same clients before the first clustering."""
    settings, clients = experiment.method.settings, len(job.members)
    if not isinstance(settings, ClusterSettings) or settings.selectors == 1 or job.cohort_size < clients:
        return
    if settings.selectors * settings.intervals(experiment.rounds)[0] < experiment.rounds:
        _log.warning(
            "%s: all %d clients take part in each round, so after the warm-up the selectors differ only in "
            "the order of their batches, and the first clusters are random: set [cohort] size below %d (the "
            "paper: 5 of 53 clients, 10 of 200)",
            experiment.method.name,
            clients,
            clients,
        )


DATA, REFERENCE = "data", "reference"
_MODELS = ("model.name", "method.reward_model")
_FILES = ("fleet.trace", "graph.file")
"""Settings with paths of folders or files that a job is built from."""


def job_factory(experiment: Experiment, cache: Path) -> JobFactory:
    """Return a factory that calls :func:`build_worker_job`, with the files that another machine needs.

    Another machine gets the tokens of all pairs and, unless ``[engine.ray] ship_model`` is false, the folder
    of the model. It loads a model with a hub name from the hub.

    Args:
        cache: the folder in which :func:`build_job` has built the job.
    """
    # A worker sees only its own device.
    engine = experiment.engine.model_copy(update={"devices": None})
    text = to_toml(experiment.model_copy(update={"engine": engine}))
    order = {"experiment": text, "folder": str(cache.resolve()), "code": code_digests(experiment)}
    ray, settings = experiment.engine.ray, flatten(experiment.tables())
    names = _FILES if ray is not None and not ray.ship_model else (*_MODELS, *_FILES)
    paths = {name: Path(settings[name]) for name in names if name in settings}
    shipped = {name: path.resolve() for name, path in paths.items() if path.exists()}
    factory = "prefed.runs.build:build_worker_job"
    code = {f"{own.digest}.py": Path(own.place) for own in experiment.code().values() if own.source}
    return JobFactory(factory, json.dumps(order), {DATA: cache.resolve() / DATA, **shipped, **code})


def code_digests(experiment: Experiment) -> dict[str, str]:
    """Return name → digest of each object from outside prefed."""
    return {name: code.digest for name, code in experiment.code().items()}


def parent_experiment(tables: dict[str, Any], digests: Mapping[str, str]) -> Experiment:
    """Return the experiment of the parent process, with the code that it has allowed.

    Args:
        digests: from :func:`code_digests` in the parent process.

    Raises:
        ConfigError: the code is not the same here.
    """
    allow_code(tables)
    experiment = Experiment.from_tables(tables, "the run's experiment")
    if sorted(code_digests(experiment).values()) != sorted(digests.values()):
        raise ConfigError(f"not the same version as where the run started: {', '.join(digests)}")
    return experiment


def build_worker_job(arguments: str, folder: Path | None = None) -> Job:
    """Build the job of a run in another process.

    Args:
        arguments: its experiment and folder as JSON.
        folder: copies of the files from :func:`job_factory`, and cache of reference log-probabilities;
            ``None`` on the machine of the run.
    """
    order = json.loads(arguments)
    tables = parse_toml(order["experiment"], "the run's experiment")
    if folder is None:
        return build_job(parent_experiment(tables, order["code"]), Path(order["folder"]))
    for table, key, _ in code_names(tables):
        path, rest = plugins.file_of(table[key])
        table[key] = f"{folder / order['code'][table[key]]}.py{rest}" if path else table[key]
    for name in (*_MODELS, *_FILES):
        table, _, key = name.partition(".")
        if (folder / name).exists():
            tables[table][key] = str(folder / name)
    experiment = parent_experiment(tables, order["code"])
    dataset = FederatedDataset.open(folder / DATA)
    return assemble_job(experiment, build_trainers(experiment, dataset, folder / REFERENCE))


def lockstep(experiment: Experiment, job: Job) -> Lockstep | None:
    """Return the trainer of ``[engine] stack`` clients at a time; ``None`` if that is 1.

    Raises:
        ModelError: clients cannot share passes over this model.
    """
    if experiment.engine.stack == 1:
        return None
    from prefed.train.lockstep import Lockstep

    return Lockstep(cast(PairTrainerFactory, job.trainers).pair_trainer, experiment.engine.stack)
