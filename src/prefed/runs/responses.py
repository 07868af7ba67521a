"""What the models of runs respond to prompts: generated once, and kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from prefed.align.judge.questions import NumberedPrompt
from prefed.align.policy import FOLDER as START
from prefed.align.policy import TASTING, load_base, load_policy, read_policy, save_over_start
from prefed.align.tastes import load_tastes
from prefed.core import Key, Tensors, files
from prefed.data import Prompt, Template
from prefed.data.encoding import continuation_text
from prefed.models import Backbone, ModelConfig
from prefed.models.adapters import atomic_folder
from prefed.models.backbone import model_digest
from prefed.runs.align import FOLDER, stored_settings
from prefed.runs.journal import Journal
from prefed.runs.loaded_run import LoadedRun
from prefed.runs.record import RunError
from prefed.runs.tastes import any_taste, server_taste
from prefed.train.generation import Sampling, as_prompt, complete_batch, length_batches, prompt_ids

BATCH = 16
"""Responses that are generated together."""

ALIGNED = Path(FOLDER) / "adapter"
"""In a run directory: the adapter of the model that selectors aligned."""

POLICY = Path(FOLDER) / "policy.safetensors"
"""In a run directory: the tensors of an aligned model that takes a taste."""

Progress = Callable[[str, int, int], None]
"""Is called with what is being done, how much of it is done, and of how much."""


class Side(Protocol):
    """One of the two whose texts are compared.

    Attributes:
        name: for people, and for the names of files.
    """

    name: str

    def texts(self, prompts: Sequence[NumberedPrompt], folder: Path, progress: Progress) -> dict[int, str]:
        """Row of a prompt → the text; prompts without one are absent."""


@dataclass
class References:
    """Reference answers from a file."""

    name: str
    answers: Sequence[str]

    def texts(self, prompts: Sequence[NumberedPrompt], folder: Path, progress: Progress) -> dict[int, str]:
        """The answer of each prompt."""
        return {prompt.row: answer for prompt, answer in zip(prompts, self.answers, strict=True)}


@dataclass
class ModelSide:
    """A model that responds.

    Attributes:
        name: for people, and for the names of files.
        run: gives the form of prompts.
        backbone: the frozen model.
        tensors: what is laid over it (full layout).
        identity: tells this model from any other.
        how: the sampling.
        seed: of the draws.
        raw: prompts are taken unchanged.
        taste: ``[d_z]`` with which it responds, if it takes one.
    """

    name: str
    run: LoadedRun
    backbone: Backbone
    tensors: Tensors
    identity: Mapping[str, Any]
    how: Sampling
    seed: int
    raw: bool
    taste: torch.Tensor | None = None

    def texts(self, prompts: Sequence[NumberedPrompt], folder: Path, progress: Progress) -> dict[int, str]:
        """The response to each prompt that does not fill the model's window.

        Responses are appended to a file in ``folder``, whose name has a digest of all that they depend on.
        What it holds is not generated again.

        Raises:
            RunError: another process writes to that file.
        """
        ids = {row.row: self.ids(row.prompt) for row in prompts}
        about = {**self.identity, **self.how.model_dump(), "seed": self.seed, "ids": ids}
        digest = files.digest(json.dumps(about, sort_keys=True, default=str).encode())
        with Journal(folder / f"{slug(self.name)}-{digest}.jsonl") as journal:
            for batch in self._responses(ids, frozenset(journal.rows)):
                journal.append({"row": row, "text": text} for row, text in batch)
                progress(f"responses of {self.name}", len(journal.rows), len(ids))
            rows = journal.rows
        return {row: rows[row]["text"] for row in ids if rows[row]["text"] is not None}

    def _responses(
        self, ids: Mapping[int, list[int]], done: Collection[int]
    ) -> Iterator[list[tuple[int, str | None]]]:
        """Row and response of each prompt, batch by batch; ``None`` for a prompt that fills the window.

        A batch is left out if all of it is done. Batches do not depend on what is done, because the number of
        sequences in a batch may change a last digit.
        """
        backbone, key = self.backbone, Key(self.seed).at("judge")
        window = backbone.window
        long = [row for row in ids if window is not None and len(ids[row]) >= window]
        yield [(row, None) for row in long if row not in done]
        rows = [row for row in ids if row not in long]
        for batch in length_batches([ids[row] for row in rows], BATCH):
            names = [rows[place] for place in batch]
            if all(row in done for row in names):
                continue
            keys = [key.at("row", row) for row in names]
            tastes = None if self.taste is None else self.taste.expand(len(names), -1)
            tokens = complete_batch(
                backbone, self.tensors, [ids[row] for row in names], self.how, keys, tastes=tastes
            )
            texts = (
                continuation_text(backbone.tokenizer, ids[row], own)
                for row, own in zip(names, tokens, strict=True)
            )
            yield [(row, text) for row, text in zip(names, texts, strict=True) if row not in done]

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; unless it is taken unchanged, a text has the form of the run's data."""
        if isinstance(prompt, str):
            prompt = as_prompt(prompt, self._example, raw=self.raw)
        return prompt_ids(self.backbone.tokenizer, self._template, prompt)

    @cached_property
    def _template(self) -> Template:
        return Template(self.backbone.tokenizer, self.run.experiment.data.template)

    @cached_property
    def _example(self) -> Any:
        dataset = self.run.trainers.dataset
        return dataset.tokens.record(0).prompt if dataset.has_pairs else None


class Models:
    """The models of a run that respond to prompts."""

    def __init__(self, run: LoadedRun, how: Sampling, *, seed: int = 0, raw: bool = False) -> None:
        self._run, self._how, self._seed, self._raw = run, how, seed, raw

    @property
    def aligned(self) -> bool:
        """Whether selectors have aligned a model in this run."""
        return (self._run.record.path / ALIGNED).is_dir()

    @property
    def takes_tastes(self) -> bool:
        """Whether the aligned model takes a taste."""
        return self.aligned and (self._run.record.path / POLICY).is_file()

    def own(self, client: str | None, taste: str | None = None) -> ModelSide:
        """The aligned model where the run has one, else the published one; with ``client`` that client's own.

        An aligned model that takes a taste is taken at that of the population, or with ``client`` at what
        this client told of its own.

        Args:
            taste: at another taste, a name of :mod:`prefed.runs.tastes`. With ``infer:N`` ``client``
                says whose pairs tell it, and the run is loaded with its data.

        Raises:
            RunError: the run has no such model, client or taste, or it has selectors alone, which write no
                text.
            ValueError: see :func:`prefed.runs.tastes.any_taste`.
        """
        run = self._run
        name = run.record.name
        if taste is not None and not self.takes_tastes:
            raise RunError(
                f"{run.record.path}: no model of it takes a taste; align one: prefed align {run.record.path} "
                "--prompts FILE --set align.tastes=posteriors, with a run of fedvpl or fedvpa"
            )
        if self.takes_tastes and (taste or client) is not None:
            return self._tasting(client, taste)
        if client is None and self.aligned:
            backbone = self._adapted
            identity = {"model": model_digest(backbone)}
            return self._side(f"{name}, aligned", backbone, backbone.reference, identity)
        if run.method.reads == "choice" and self.aligned:
            raise RunError(
                f"{run.record.path}: {run.method.name} gives no client a model that writes text; without "
                "--client the aligned model is taken"
            )
        if run.method.reads == "choice":
            raise RunError(
                f"{run.record.path}: {run.method.name} trains selectors, which write no text; "
                f"align a model with them first: prefed align {run.record.path} --prompts FILE"
            )
        if client is None:
            return self._laid_over(name, run.published_model)
        return self._laid_over(f"{name}, {client}", run.model(client))

    def aligned_at(self, client: str | None, taste: str | None = None) -> ModelSide:
        """The aligned model; one that takes a taste at that one, as :meth:`own`, which raises the same.

        Raises:
            RunError: the run has none, or it takes no taste and one is named.
        """
        run = self._run
        if not self.aligned and taste is None:
            raise RunError(
                f"{run.record.path} has no aligned model: prefed align {run.record.path} --prompts FILE"
            )
        if client is not None and not self.takes_tastes:
            raise RunError(
                f"{run.record.path}: its aligned model takes no taste of a client: leave out --client"
            )
        return self.own(client, taste)

    def shared(self, client: str) -> ModelSide:
        """The model that the server publishes to a client, without any client's own parts.

        Raises:
            RunError: there is no such client, or the method shares no model.
        """
        run = self._run
        if self.takes_tastes:
            return self.own(None)
        published = run.method.publish(run.server, run.check(client))
        if not published.tensors or run.method.reads == "choice":
            raise RunError(f"{run.record.path}: {run.method.name} shares no model that writes text")
        return self._laid_over(f"{run.record.name}, shared", run.job.shared(published))

    def save_adapter(self, side: ModelSide, folder: Path) -> None:
        """Write the aligned model at the taste of ``side`` as a PEFT adapter for the base model."""
        if side.taste is None:
            # Its weights have the adapter already.
            with atomic_folder(folder) as partial:
                for item in (self._run.record.path / ALIGNED).iterdir():
                    shutil.copyfile(item, partial / item.name)
            return
        start = self._run.record.path / FOLDER / START
        save_over_start(side.backbone, side.tensors, start, folder, side.taste)

    def base(self) -> ModelSide:
        """The untouched model: the one that the aligned adapter is for, or the run's."""
        run = self._run
        if self.aligned and self._model != run.experiment.model:
            backbone = load_base(self._model, run.experiment.seed, None)
            return self._side("base", backbone, backbone.reference, {"model": model_digest(backbone)})
        return self._laid_over("base", run.backbone.reference)

    def _tasting(self, client: str | None, taste: str | None) -> ModelSide:
        run, folder = self._run, self._run.record.path / FOLDER
        known = load_tastes(folder)
        if taste is None:
            assert client is not None
            what, z = client, server_taste(run, "client", client, known, pairs=True)
        else:
            what = taste if client is None else f"{taste} of {client}"
            z = any_taste(run, taste, client, known)
        backbone, tensors = self._policy
        identity = {
            "model": model_digest(backbone),
            "tensors": files.digest(tensors.flat.numpy().tobytes()),
            "taste": files.digest(z.numpy().tobytes()),
        }
        name = f"{run.record.name}, aligned, taste {what}"
        return replace(self._side(name, backbone, tensors, identity), taste=z)

    @cached_property
    def _policy(self) -> tuple[Backbone, Tensors]:
        """The policy that takes a taste."""
        experiment, folder = self._run.experiment, self._run.record.path / FOLDER
        model = self._model.model_copy(update={"variational": experiment.model.variational})
        backbone = load_policy(model, experiment.seed, folder, TASTING)
        return backbone, read_policy(backbone, self._run.record.path / POLICY)

    @cached_property
    def _model(self) -> ModelConfig:
        """The model that the run's alignment began with."""
        model = (stored_settings(self._run.record) or {}).get("model")
        return self._run.experiment.model if model is None else ModelConfig.model_validate(model)

    @cached_property
    def _adapted(self) -> Backbone:
        return load_base(self._model, self._run.experiment.seed, self._run.record.path / ALIGNED)

    def _laid_over(self, name: str, tensors: Tensors) -> ModelSide:
        backbone = self._run.backbone
        identity = {
            "model": self._run.trainers.fingerprint["model"],
            "tensors": files.digest(tensors.flat.cpu().numpy().tobytes()),
        }
        return self._side(name, backbone, tensors, identity)

    def _side(
        self, name: str, backbone: Backbone, tensors: Tensors, identity: Mapping[str, Any]
    ) -> ModelSide:
        return ModelSide(name, self._run, backbone, tensors, identity, self._how, self._seed, self._raw)


def slug(text: str) -> str:
    """A text as part of a file's name.

    >>> slug("endpoint:org/model:free"), slug("run, Zoë")
    ('endpoint-org-model-free', 'run-Zoë')
    """
    name = "-".join("".join(c if c.isalnum() or c in "._" else " " for c in text).split())[:80]
    # File systems count bytes, and a letter has up to four.
    return name.encode()[:160].decode(errors="ignore")
