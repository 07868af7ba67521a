"""Responses of the models of runs, generated once and stored in files."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

import torch

from prefed.align.judge.endpoint import Endpoint, NoAnswerError
from prefed.align.judge.questions import JudgeError, NumberedPrompt
from prefed.align.policy import FOLDER as START
from prefed.align.policy import TASTING, copy_adapter, load_base, load_policy, read_policy, save_over_start
from prefed.align.tastes import load_tastes
from prefed.config import EndpointConfig
from prefed.core import Key, Tensors, files
from prefed.data import Prompt, Template
from prefed.data.encoding import continuation_text
from prefed.models import Backbone, ModelConfig
from prefed.models.backbone import model_digest
from prefed.models.trainable_parts import EXAMPLES
from prefed.runs.align import FOLDER, stored_settings
from prefed.runs.append_log import Journal
from prefed.runs.finished_run import RunError
from prefed.runs.loaded_run import LoadedRun
from prefed.runs.tastes import any_taste, server_taste
from prefed.train.generation import BATCH, Sampling, as_prompt, complete_batch, padded_batches

ALIGNED = Path(FOLDER) / "adapter"
"""In a run directory: the adapter of the aligned model."""

POLICY = Path(FOLDER) / "policy.safetensors"
"""In a run directory: the tensors of an aligned model that takes tastes."""

Progress = Callable[[str, int, int], None]
"""Called with the name of an activity, the number of finished items, and of all items."""


class Side(Protocol):
    """One side of a comparison.

    Attributes:
        name: for display and file names.
    """

    name: str

    def texts(self, prompts: Sequence[NumberedPrompt], folder: Path, progress: Progress) -> dict[int, str]:
        """Return row of a prompt → text; prompts without a text are absent."""


@dataclass
class References:
    """Reference answers from a file."""

    name: str
    answers: Sequence[str]

    def texts(self, prompts: Sequence[NumberedPrompt], folder: Path, progress: Progress) -> dict[int, str]:
        """Return row of a prompt → answer."""
        return {prompt.row: answer for prompt, answer in zip(prompts, self.answers, strict=True)}


@dataclass
class ModelSide:
    """A model that responds to prompts.

    Attributes:
        name: for display and file names.
        run: determines the format of prompts.
        tensors: the trained tensors (full layout).
        how: the sampling.
        raw: use prompts unchanged.
        taste: ``[d_z]``, for a model that takes tastes.
        server: generates the responses with the same model, if not ``None``. Its responses are not
            bit-reproducible.
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
    server: EndpointConfig | None = None

    def texts(self, prompts: Sequence[NumberedPrompt], folder: Path, progress: Progress) -> dict[int, str]:
        """Return the response to each prompt that leaves room in the model's context.

        Responses are appended to a file in ``folder``, with a digest of their inputs in its name, and are not
        generated again.

        Raises:
            RunError: another process writes to the file.
            JudgeError: the server does not respond, or rejects a prompt.
        """
        ids = {row.row: self.ids(row.prompt) for row in prompts}
        about = {**self.identity, **self.served, **self.how.model_dump(), "seed": self.seed, "ids": ids}
        digest = files.digest(json.dumps(about, sort_keys=True, default=str).encode())
        with Journal(folder / f"{slug(self.name)}-{digest}.jsonl") as journal:
            done = frozenset(journal.rows)
            remote = self.server is not None
            for batch in self._served(prompts, ids, done) if remote else self._responses(ids, done):
                journal.append({"row": row, "text": text} for row, text in batch)
                progress(f"responses of {self.name}", len(journal.rows), len(ids))
            rows = journal.rows
        return {row: rows[row]["text"] for row in ids if rows[row]["text"] is not None}

    def _responses(
        self, ids: Mapping[int, list[int]], done: Collection[int]
    ) -> Iterator[list[tuple[int, str | None]]]:
        """Yield batches of rows and responses; ``None`` for a prompt that fills the context.

        Finished batches are skipped. Batches do not depend on ``done``, because the number of sequences in a
        batch may change the last digits.
        """
        backbone, key = self.backbone, Key(self.seed).at("judge")
        long = self._too_long(ids)
        yield [(row, None) for row in long if row not in done]
        rows = [row for row in ids if row not in long]
        for batch in padded_batches(backbone, [ids[row] for row in rows], self.how, BATCH):
            names = [rows[place] for place in batch]
            if all(row in done for row in names):
                continue
            keys = [key.at("row", row) for row in names]
            tastes = None if self.taste is None else self.taste.expand(len(names), -1)
            responses = complete_batch(
                backbone, self.tensors, [ids[row] for row in names], self.how, keys, tastes=tastes
            )
            texts = (
                continuation_text(backbone.tokenizer, ids[row], response.tokens)
                for row, response in zip(names, responses, strict=True)
            )
            yield [(row, text) for row, text in zip(names, texts, strict=True) if row not in done]

    def _served(
        self, prompts: Sequence[NumberedPrompt], ids: Mapping[int, list[int]], done: Collection[int]
    ) -> Iterator[list[tuple[int, str | None]]]:
        """Yield rows and responses of the server, as :meth:`_responses`."""
        assert self.server is not None
        url, server, long = self.server.url, responder(self.server), self._too_long(ids)
        yield [(row, None) for row in long if row not in done]

        def ask(asked: NumberedPrompt) -> list[tuple[int, str | None]]:
            seed = Key(self.seed).at("judge").at("row", asked.row).number()
            try:
                text = server.respond(self._formed(asked.prompt), self._template, self.how, seed).text
            except NoAnswerError as error:
                raise JudgeError(
                    f"{url}: no response of {self.name} to prompt {asked.row}: {error}; remove the prompt, "
                    "or run the command again"
                ) from None
            return [(asked.row, text)]

        yield from server.map(ask, [each for each in prompts if each.row not in {*done, *long}])

    def _too_long(self, ids: Mapping[int, list[int]]) -> list[int]:
        window = self.backbone.window
        return [row for row in ids if window is not None and len(ids[row]) >= window]

    @property
    def served(self) -> dict[str, Any]:
        """Where the responses come from, if not from this process."""
        server = self.server
        return {} if server is None else {"server": {"model": server.model, "url": server.url}}

    def ids(self, prompt: Prompt) -> list[int]:
        """Tokenise a prompt; a plain text gets the format of the run's data unless ``raw`` is set."""
        return self._template.prompt_ids(self._formed(prompt))

    def _formed(self, prompt: Prompt) -> Prompt:
        # The example is needed, and may be read, only to format a text.
        return as_prompt(prompt, self.run.example) if isinstance(prompt, str) and not self.raw else prompt

    @cached_property
    def _template(self) -> Template:
        return Template.of(self.backbone.tokenizer, self.run.experiment.data)


def responder(config: EndpointConfig) -> Endpoint:
    """Return the client of a server that generates responses for ``prefed judge``.

    Raises:
        JudgeError: as :class:`~prefed.align.judge.endpoint.Endpoint`.
    """
    return Endpoint(config.model, config, setting="--responses", prefix="--", url_setting="--responses-url")


class Models:
    """The models of a run, as sides of a comparison."""

    def __init__(self, run: LoadedRun, how: Sampling, *, seed: int = 0, raw: bool = False) -> None:
        self._run, self._how, self._seed, self._raw = run, how, seed, raw

    @property
    def aligned(self) -> bool:
        """Whether the run has an aligned model."""
        return (self._run.record.path / ALIGNED).is_dir()

    @property
    def takes_tastes(self) -> bool:
        """Whether the aligned model takes tastes."""
        return self.aligned and (self._run.record.path / POLICY).is_file()

    def own(self, client: str | None, taste: str | None = None) -> ModelSide:
        """Return the aligned model if any, else the shared one, or the personal one of ``client``.

        An aligned model that takes tastes uses that of the population, or the one that ``client`` sent.

        Args:
            taste: use another taste, a name as in :mod:`prefed.runs.tastes`. For ``infer:N``, ``client`` is
                the owner of the pairs, and the run must be loaded with its data.

        Raises:
            RunError: the run has no such model, client or taste, or only selectors, which generate no text.
            ValueError: as :func:`prefed.runs.tastes.any_taste`.
        """
        run = self._run
        name = run.record.name
        if EXAMPLES in run.backbone.needs:
            raise RunError(
                f"{run.record.path}: {run.method.name} judges pairs with the base model, and has no other "
                "that generates text"
            )
        if taste is not None and not self.takes_tastes:
            raise RunError(
                f"{run.record.path} has no model that takes tastes; with a run of fedvpl or fedvpa: "
                f"prefed align {quote(str(run.record.path))} --prompts FILE --set align.tastes=posteriors"
            )
        if self.takes_tastes and (taste or client) is not None:
            return self._tasting(client, taste)
        if client is None and self.aligned:
            backbone = self._adapted
            identity = {"model": model_digest(backbone)}
            return self._side(f"{name}, aligned", backbone, backbone.reference, identity)
        if run.method.reads == "choice" and self.aligned:
            raise RunError(
                f"{run.record.path}: clients of {run.method.name} have no model that generates text; leave "
                "out --client to use the aligned model"
            )
        if run.method.reads == "choice":
            raise RunError(
                f"{run.record.path}: {run.method.name} trains selectors, which generate no text; "
                f"align a model with them first: prefed align {quote(str(run.record.path))} --prompts FILE"
            )
        if client is None:
            return self._laid_over(name, run.published_model)
        return self._laid_over(f"{name}, {client}", run.model(client))

    def aligned_at(self, client: str | None, taste: str | None = None) -> ModelSide:
        """Return the aligned model, with a taste if it takes one; see :meth:`own`.

        Raises:
            RunError: the run has no aligned model, or it takes no taste and one is given.
        """
        run = self._run
        if not self.aligned and taste is None:
            raise RunError(
                f"{run.record.path} has no aligned model; align one: "
                f"prefed align {quote(str(run.record.path))} --prompts FILE"
            )
        if client is not None and not self.takes_tastes:
            raise RunError(f"{run.record.path}: the aligned model takes no tastes; leave out --client")
        return self.own(client, taste)

    def shared(self, client: str) -> ModelSide:
        """Return the model that the server publishes to a client, without personal parts.

        Raises:
            RunError: there is no such client, or the method shares no model.
        """
        run = self._run
        if self.takes_tastes:
            return self.own(None)
        published = run.method.publish(run.server, run.check(client))
        if not published.tensors or run.method.reads == "choice":
            raise RunError(f"{run.record.path}: {run.method.name} shares no model that generates text")
        return self._laid_over(f"{run.record.name}, shared", run.job.shared(published))

    def save_adapter(self, side: ModelSide, folder: Path) -> None:
        """Write the aligned model, with the taste of ``side``, as a PEFT adapter for the base model."""
        if side.taste is None:
            # The adapter is already merged into the weights of ``side``.
            copy_adapter(self._run.record.path / ALIGNED, folder)
            return
        start = self._run.record.path / FOLDER / START
        save_over_start(side.backbone, side.tensors, start, folder, side.taste)

    def base(self) -> ModelSide:
        """Return the base model: the base model of the alignment, or of the run."""
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
        """The aligned model that takes tastes, and its tensors."""
        experiment, folder = self._run.experiment, self._run.record.path / FOLDER
        model = self._model.model_copy(update={"variational": experiment.model.variational})
        backbone = load_policy(model, experiment.seed, folder, TASTING)
        return backbone, read_policy(backbone, self._run.record.path / POLICY)

    @cached_property
    def _model(self) -> ModelConfig:
        """The base model of the alignment."""
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
    """Convert a text to a part of a file name. A long one is cut and ends with a digest of the text.

    >>> slug("endpoint:org/model:free"), slug("run, Zoë")
    ('endpoint-org-model-free', 'run-Zoë')
    """
    name = "-".join("".join(c if c.isalnum() or c in "._" else " " for c in text).split())
    # File systems limit bytes, and a character has up to four.
    if len(name) <= 80 and len(name.encode()) <= 160:
        return name
    return f"{name[:63].encode()[:143].decode(errors='ignore')}-{files.digest(text.encode())}"
