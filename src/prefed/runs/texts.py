"""What the models of runs respond to prompts: generated once, and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from prefed import files
from prefed.core import Key, Tensors
from prefed.data import Template
from prefed.judge.prompts import PromptRow
from prefed.models import Backbone, ModelConfig, ModelError, load_pretrained, make_backbone
from prefed.runs.journal import Journal
from prefed.runs.loaded import LoadedRun
from prefed.runs.record import RunError
from prefed.train.generation import Sampling, as_prompt, complete, prompt_ids
from prefed.train.rewards import model_fingerprint

ALIGNED = Path("align") / "adapter"
"""In a run directory: the adapter of the model that selectors aligned."""

Progress = Callable[[str, int, int], None]
"""Is called with what is being done, how much of it is done, and of how much."""


class Side(Protocol):
    """One of the two whose texts are compared.

    Attributes:
        name: for people, and for the names of files.
    """

    name: str

    def texts(self, prompts: Sequence[PromptRow], folder: Path, progress: Progress) -> dict[int, str]:
        """Row of a prompt → the text; prompts without one are absent."""


@dataclass
class References:
    """Reference answers from a file."""

    name: str
    answers: Sequence[str]

    def texts(self, prompts: Sequence[PromptRow], folder: Path, progress: Progress) -> dict[int, str]:
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
    """

    name: str
    run: LoadedRun
    backbone: Backbone
    tensors: Tensors
    identity: Mapping[str, Any]
    how: Sampling
    seed: int
    raw: bool

    def texts(self, prompts: Sequence[PromptRow], folder: Path, progress: Progress) -> dict[int, str]:
        """The response to each prompt that does not fill the model's window.

        Responses are appended to a file in ``folder``, whose name has a digest of all that they depend on.
        What it holds is not generated again.

        Raises:
            RunError: another process writes to that file.
        """
        ids = {row.row: self._ids(row) for row in prompts}
        about = {**self.identity, **self.how.model_dump(), "seed": self.seed, "ids": ids}
        digest = files.digest(json.dumps(about, sort_keys=True, default=str).encode())
        with Journal(folder / f"{slug(self.name)}-{digest}.jsonl") as journal:
            for row, text in self._responses({row: ids[row] for row in ids if row not in journal.rows}):
                journal.append([{"row": row, "text": text}])
                progress(f"responses of {self.name}", len(journal.rows), len(ids))
            rows = journal.rows
        return {row: rows[row]["text"] for row in ids if rows[row]["text"] is not None}

    def _responses(self, prompts: Mapping[int, list[int]]) -> Iterator[tuple[int, str | None]]:
        """Row and response of each prompt; ``None`` for a prompt that fills the window."""
        key = Key(self.seed).at("judge")
        window = getattr(self.backbone.causal.config, "max_position_embeddings", None)
        for row, ids in prompts.items():
            if window is not None and len(ids) >= window:
                yield row, None
            else:
                yield row, complete(self.backbone, self.tensors, ids, self.how, key.at("row", row))

    def _ids(self, row: PromptRow) -> list[int]:
        text = row.prompt
        if isinstance(text, str):
            text = as_prompt(text, self._example, raw=self.raw or text.startswith("\n\nHuman: "))
        template = Template(self.backbone.tokenizer, self.run.experiment.data.template)
        return prompt_ids(self.backbone.tokenizer, template, text)

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

    def own(self, client: str | None) -> ModelSide:
        """The aligned model where the run has one, else the published one; with ``client`` that client's own.

        Raises:
            RunError: the run has no such model or client, or it has selectors alone, which write no text.
        """
        run = self._run
        name = run.record.name
        if client is None and self.aligned:
            backbone, identity = self._adapted
            return self._side(f"{name}, aligned", backbone, backbone.reference, identity)
        if run.method.reads == "choice":
            raise RunError(
                f"{run.record.path}: {run.method.name} trains selectors, which write no text; "
                f"align a model with them first: prefed align {run.record.path} --prompts FILE"
            )
        if client is None:
            return self._laid_over(name, run.published_model)
        return self._laid_over(f"{name}, {client}", run.model(client))

    def shared(self, client: str) -> ModelSide:
        """The model that the server publishes to a client, without any client's own parts.

        Raises:
            RunError: there is no such client, or the method shares no model.
        """
        run = self._run
        published = run.method.publish(run.server, run.check(client))
        if not published.tensors or run.method.reads == "choice":
            raise RunError(f"{run.record.path}: {run.method.name} shares no model that writes text")
        return self._laid_over(f"{run.record.name}, shared", run.job.shared(published))

    def base(self) -> ModelSide:
        """The untouched model: the one that the aligned adapter is for, or the run's."""
        run = self._run
        if self.aligned and self._base_name != run.experiment.model.name:
            backbone, identity = _plain_backbone(run, self._base_name, None)
            return self._side("base", backbone, backbone.reference, identity)
        return self._laid_over("base", run.backbone.reference)

    @cached_property
    def _base_name(self) -> str:
        path = self._run.record.path / ALIGNED / "adapter_config.json"
        try:
            name = json.loads(path.read_text("utf-8"))["base_model_name_or_path"]
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"{path.parent} is no adapter: {error}") from error
        return str(name)

    @cached_property
    def _adapted(self) -> tuple[Backbone, Mapping[str, Any]]:
        return _plain_backbone(self._run, self._base_name, self._run.record.path / ALIGNED)

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


def _plain_backbone(run: LoadedRun, name: str, adapter: Path | None) -> tuple[Backbone, Mapping[str, Any]]:
    """A base model, with an adapter merged into it, and what it is. Nothing is laid over it."""
    from peft import PeftModel
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    key, settings = "[align] model", run.experiment.model
    kind = "causal language model"
    tokenizer = load_pretrained(AutoTokenizer, key, name, "tokenizer")
    model = load_pretrained(AutoModelForCausalLM, key, name, kind, dtype=settings.dtype)
    identity = {"model": model_fingerprint(name, key, kind)}
    if adapter is not None:
        try:
            model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise ModelError(f"{adapter} does not fit {name!r}: {error}") from error
        identity["adapter"] = files.file_digest(adapter / "adapter_model.safetensors")
    config = ModelConfig.model_validate({"name": name, "device": settings.device, "lora": {"rank": 1}})
    return make_backbone(model, tokenizer, config, Key(0)), identity


def slug(text: str) -> str:
    """A text as part of a file's name.

    >>> slug("endpoint:org/model:free"), slug("run, Zoë")
    ('endpoint-org-model-free', 'run-Zoë')
    """
    return "-".join("".join(c if c.isalnum() or c in "._" else " " for c in text).split())[:80]
