"""The ``[data]`` and ``[selector]`` tables."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, field_validator, model_validator

from prefed.core.strict_settings import StrictModel
from prefed.core.text import control_character


def _check_date(value: str) -> str:
    date.fromisoformat(value)
    return value


class Columns(StrictModel):
    """Column names of a source. A dot selects a nested column: ``"question.full_text"``.

    Attributes:
        prompt: omit it if chosen and rejected are whole dialogues with a common beginning. Several columns,
            such as ``["instruction", "input"]``, are joined in their order into a conversation: lists of
            messages keep their turns, and texts become a user turn.
        system: the system message. With it, a text prompt is a user turn.
        chosen: the preferred response.
        rejected: the other response.
        responses: two columns of responses, instead of chosen and rejected.
        preference: the column that names the better of ``responses``: by the name of its column, by the part
            in which the two names differ (``"a"`` or ``1``), or as ``"left"`` or ``"right"``; or ``"tie"``.
        margin: strength of the preference.
        client: the person or organisation with this preference.
        category: a label within the task.
        domain: the dataset of the row.
        split: ``train``, ``validation`` or ``test``.
        completion: the only response of a row with a thumb, instead of chosen and rejected.
        label: the thumb.
    """

    prompt: str | tuple[str, ...] | None = None
    system: str | None = None
    chosen: str = "chosen"
    rejected: str = "rejected"
    responses: tuple[str, str] | None = None
    preference: str | None = None
    completion: str | None = None
    label: str | None = None
    margin: str | None = None
    client: str | None = None
    category: str | None = None
    domain: str | None = None
    split: str | None = None

    @model_validator(mode="after")
    def _votes(self) -> Columns:
        if (self.responses is None) != (self.preference is None):
            raise ValueError(
                "responses requires preference, the column that names the better one, and vice versa"
            )
        return self

    @property
    def prompts(self) -> tuple[str, ...]:
        """The columns of the prompt, if any.

        >>> Columns(prompt="question").prompts, Columns().prompts
        (('question',), ())
        """
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt or ()

    @property
    def thumb(self) -> tuple[str, str] | None:
        """The columns of response and thumb; ``None`` if rows are pairs.

        >>> Columns(label="liked").thumb
        ('completion', 'liked')
        """
        if self.completion is None and self.label is None:
            return None
        return self.completion or "completion", self.label or "label"


class Source(StrictModel):
    """A file, a folder of files or a hub dataset. A plain string is short for its ``path``.

    Attributes:
        path: a ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` (each also ``.gz``) or ``.parquet`` file, a folder
            of such files (sorted by name, including subfolders), a folder saved by ``datasets``, or a hub
            name such as ``Anthropic/hh-rlhf``.
        format: how a row becomes a pair: a name in :data:`prefed.data.FORMATS` or the hub name of a format.
            Default: ``data.format``.
        columns: column names, instead of a format.
        subset: configuration or folder of a hub dataset, e.g. ``harmless-base``.
        split: split of a hub dataset, or of a saved dataset with several splits. Default: the role of the
            source, e.g. ``test`` for ``data.test``.
        revision: branch, tag or commit of a hub dataset.
        encoding: encoding of text files. Default: ``data.encoding``.
    """

    path: str = Field(min_length=1)
    format: str | None = None
    columns: Columns | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    encoding: str | None = None


Sizes: TypeAlias = Annotated[float, Field(ge=0)] | list[Annotated[float, Field(gt=0)]]
"""The relative sizes of the clients, see :class:`Iid`."""


def _check_name(name: str) -> str:
    if not name:
        raise ValueError("empty client name")
    control = control_character(name)
    if control is not None:
        raise ValueError(f"client name {name!r} contains the control character {control}")
    return name


Name: TypeAlias = Annotated[str, AfterValidator(_check_name)]
"""Client id: text without control characters."""


class Iid(StrictModel):
    """Shuffle the pairs and cut them into equal shards, or into shards of the given ``sizes``.

    Attributes:
        clients: number of clients.
        sizes: relative sizes of the clients: one positive weight per client, or the exponent a of a power law
            (client k has a share proportional to (k+1)^−a).
    """

    by: Literal["iid"] = "iid"
    clients: int = Field(ge=1)
    sizes: Sizes | None = None


class ByColumn(StrictModel):
    """One client per value of a column or, with ``groups``, per group of values.

    Examples: the 53 annotators of FedBiscuit, the 3 or 11 programming languages of FedPDPO
    (arXiv:2603.19741).

    Attributes:
        column: the column of the values.
        groups: client → its values.
    """

    by: Literal["column"] = "column"
    column: str
    groups: dict[Name, list[str]] | None = None


class Dirichlet(StrictModel):
    """Divide each category in proportions drawn from Dir(alpha), with each prompt at only one client.

    FedBiscuit: SHP, alpha 0.3, 200 clients. FedSDG: alpha 0.1, 0.3 and 1.

    Attributes:
        column: the column of the categories.
        alpha: small values concentrate each category on few clients.
        clients: number of clients.
        share_prompts: allow clients to share prompts, for data with few prompts that occur in all categories.
    """

    by: Literal["dirichlet"] = "dirichlet"
    column: str = "category"
    alpha: float = Field(default=0.3, gt=0)
    clients: int = Field(ge=1)
    share_prompts: bool = False


class Margin(StrictModel):
    """Sort the pairs by margin, largest first, and cut them into contiguous shards.

    Source: FedPDPO (arXiv:2603.19741), D.1.2.

    Attributes:
        clients: number of clients.
        sizes: as for ``iid``.
    """

    by: Literal["margin"] = "margin"
    clients: int = Field(ge=1)
    sizes: Sizes | None = None


class BySource(StrictModel):
    """One dataset per client: ``data.train`` is a table of names and sources (FedPDPO, cross-domain)."""

    by: Literal["source"] = "source"


class ByFile(StrictModel):
    """One file per client: ``data.train`` is a folder, and ``ann.jsonl.gz`` belongs to client ``ann``.

    Subfolders are included, and duplicate names are refused. Files in the folders of ``data.validation`` and
    ``data.test`` have the same names.
    """

    by: Literal["file"] = "file"


class Conflict(StrictModel):
    """Two kinds of clients with opposite preferences (FedVPA-GP: 50/50, 70/30, 30/70).

    Attributes:
        clients: number of clients.
        ratio: share of clients of the first kind.
        column: the column of two categories, e.g. helpful and harmless. Each client has pairs of one only.
        categories: the two categories, in the order of the kinds. Default: those in the data, sorted.
        flip: instead of a column: divide all pairs at random, and swap chosen and rejected for clients of the
            second kind.
        sizes: relative sizes of the clients of each kind, as for ``iid``.
    """

    by: Literal["conflict"] = "conflict"
    clients: int = Field(ge=2)
    ratio: float = Field(default=0.5, gt=0, lt=1)
    column: str | None = None
    categories: tuple[str, str] | None = None
    flip: bool = False
    sizes: Sizes | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Conflict:
        if (self.column is None) == (not self.flip):
            raise ValueError("a conflict needs either column (with two categories) or flip = true")
        return self


Partition: TypeAlias = Annotated[
    Iid | ByColumn | Dirichlet | Margin | BySource | ByFile | Conflict, Field(discriminator="by")
]
"""The ``[data.partition]`` table: ``by`` names the rule that assigns rows to clients."""


class SelectorConfig(StrictModel):
    """The ``[selector]`` table: how to ask a selector which of two responses is better.

    Attributes:
        template: wording of the question. ``summary`` and ``answer`` are from FedBiscuit, figure 4;
            ``summary`` requires the columns subreddit, title and post. ``general`` suits any pair.
        too_long: how to treat a question longer than ``data.max_length``. ``shorten`` truncates both
            responses to the same number of tokens, at least 8, and then cuts the beginning of the prompt.
            ``drop`` drops and counts the pair, ``error`` refuses it.
    """

    template: Literal["general", "summary", "answer"] = "general"
    too_long: Literal["shorten", "drop", "error"] = "shorten"


class DataConfig(StrictModel):
    """The ``[data]`` table.

    Attributes:
        train: a source, or a table of names and sources. Each name becomes the ``domain`` of its rows.
        validation: like ``train``: rows for model selection, never for training.
        test: like ``train``: rows for evaluation.
        partition: how to assign rows to clients. If ``train`` is a table, the default is one client per
            source.
        format: default format of the sources. ``auto`` detects known datasets by their columns and otherwise
            expects prompt, chosen and rejected.
        columns: column names, instead of a format.
        metadata: columns that the model should not see, which are otherwise reported, or refused if they are
            named like a prompt or change what the model sees.
        encoding: encoding of text files.
        template: how to render conversations. ``chat`` is the tokenizer's chat template, ``dialogue`` the
            Human/Assistant form. ``auto`` is ``chat`` if the tokenizer has a template, else ``dialogue``.
            ``instruction`` is the form of Alpaca and of FedBiscuit, figure 4, for single-turn prompts.
            ``chat`` also makes a text prompt a user turn. ``rendered`` is ``auto`` for texts that a chat
            template has rendered already: control tokens such as ``<|im_end|>`` in text prompts and their
            responses are encoded as such; otherwise, they are encoded as text.
        today: the date for a chat template that contains today's, as ``2026-01-31``. Default: the date of the
            first start of a run.
        max_length: maximum number of tokens of a prompt with its longer response. Longer texts lose their
            beginning, longer conversations their oldest turns and then the beginning of the last one.
        too_long: how to treat a pair with a response that leaves no room for a token of the prompt.
        invalid: how to treat a row with a blank response or a malformed field. ``error`` reports it, ``drop``
            drops and counts it. Pairs of equal responses are always dropped and counted.
        duplicates: how to treat repeated pairs within a client (natural partitions) or within the whole
            dataset (other partitions). ``drop`` keeps the first, ``keep`` keeps all, ``error`` refuses them.
            ``drop_tested`` is ``drop`` and, across clients, excludes test pairs from training and validation,
            and validation pairs from training.
        rows: maximum number of rows to read from each source, or from the file of each client.
        score: tokens whose log-probability enters the loss: ``response``, or ``whole`` for prompt and
            response. With ``whole``, the prompt is only the end-of-text token, and texts that are too long
            lose their end (code of Distributed DPO).
        tail_characters: with ``whole``: number of characters to keep at the end of each text.
        min_characters: drop and count pairs with a shorter response or, with ``whole``, a shorter text.
        limit: maximum number of training pairs per client, drawn at random.
        validation_fraction: share of the pairs of each client to use for validation if there is no validation
            source.
        test_fraction: share of the pairs of each client to use for testing. Default: 0.1 if there are no
            other test rows. With one dataset or file per client, fractions apply to clients without a
            validation or test source.
        split_by: keep equal pairs, or all pairs of a prompt, in the same split.
        flip: clients with chosen and rejected swapped.
        exclude: clients whose rows are not used. Their names may occur in other settings, and their places in
            drawn cohorts stay empty, so that the cohorts of the others do not change.
        exclude_pairs: digests of single pairs that are not used, see :func:`prefed.data.record.pair_digest`.

    >>> config = DataConfig(train="pairs.jsonl", partition={"by": "iid", "clients": 4})
    >>> config.partition.clients, config.train.path
    (4, 'pairs.jsonl')
    >>> DataConfig(train={"web": "web.csv", "code": "code.csv"}).partition.by
    'source'
    """

    train: Source | dict[Name, Source]
    validation: Source | dict[str, Source] | None = None
    test: Source | dict[str, Source] | None = None
    partition: Partition
    format: str = "auto"
    columns: Columns | None = None
    metadata: tuple[str, ...] = ()
    encoding: str = "utf-8"
    template: Literal["auto", "chat", "dialogue", "instruction", "rendered"] = "auto"
    today: Annotated[str, AfterValidator(_check_date)] | None = None
    max_length: int = Field(default=512, ge=2)
    too_long: Literal["drop", "error"] = "drop"
    invalid: Literal["error", "drop"] = "error"
    duplicates: Literal["drop", "drop_tested", "keep", "error"] = "drop"
    rows: int | None = Field(default=None, ge=1)
    score: Literal["response", "whole"] = "response"
    tail_characters: int | None = Field(default=None, ge=1)
    min_characters: int | None = Field(default=None, ge=1)
    limit: int | None = Field(default=None, ge=1)
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    test_fraction: float | None = Field(default=None, ge=0, lt=1)
    split_by: Literal["pair", "prompt"] = "pair"
    flip: tuple[str, ...] = ()
    exclude: tuple[Name, ...] = ()
    exclude_pairs: tuple[str, ...] = ()

    @field_validator("train", "validation", "test", mode="before")
    @classmethod
    def _sources(cls, value: Any) -> Any:
        def one(source: Any) -> Any:
            return {"path": str(source)} if isinstance(source, str | Path) else source

        if isinstance(value, list | tuple):
            named = {Path(str(item)).name.split(".")[0]: item for item in value}
            if len(named) != len(value):
                raise ValueError(
                    "sources in a list are named after their files, and two names are equal; use a table"
                )
            value = named
        if isinstance(value, dict) and "path" not in value:
            if not value:
                raise ValueError("the table of sources is empty; name a file, or the rows of each client")
            return {name: one(source) for name, source in value.items()}
        return one(value)

    @model_validator(mode="before")
    @classmethod
    def _partition(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("partition") is None:
            train = values.get("train")
            if isinstance(train, list | tuple) or (isinstance(train, dict) and "path" not in train):
                return {**values, "partition": {"by": "source"}}
            raise ValueError(
                'set partition, e.g. to {by = "iid", clients = 10}, {by = "column", column = "worker"}, or '
                '{by = "file"} for a folder with one file per client'
            )
        return values

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if isinstance(self.partition, BySource):
            if not isinstance(self.train, dict):
                raise ValueError('by = "source" requires train = {name = source, …}: one dataset per client')
            for role in ("validation", "test"):
                sources = getattr(self, role)
                if sources is not None and (not isinstance(sources, dict) or set(sources) - set(self.train)):
                    raise ValueError(
                        f'with by = "source", {role} must be a table with names of clients in train'
                    )
        elif isinstance(self.partition, ByFile):
            for role in ("train", "validation", "test"):
                if isinstance(getattr(self, role), dict):
                    raise ValueError(f'with by = "file", {role} must be a folder with one file per client')
        else:
            for role in ("validation", "test"):
                if getattr(self, role) is not None and getattr(self, f"{role}_fraction"):
                    raise ValueError(
                        f"set either {role}, for separate pairs, or {role}_fraction, for pairs taken from "
                        "train"
                    )
        if self.exclude and not isinstance(self.partition, ByColumn | BySource | ByFile):
            raise ValueError(
                f"exclude names clients, but a partition by {self.partition.by!r} draws them from the rows: "
                "leave out single pairs, with exclude_pairs"
            )
        if self.tail_characters is not None and self.score != "whole":
            raise ValueError('tail_characters requires score = "whole"')
        by_prompt = isinstance(self.partition, Dirichlet) and not self.partition.share_prompts
        if self.score == "whole" and (by_prompt or self.split_by == "prompt"):
            raise ValueError(
                'score = "whole" leaves no prompts to group pairs by; set split_by = "pair" and, for a '
                "Dirichlet partition, share_prompts = true"
            )
        if self.validation_fraction + (self.test_fraction or 0.0) >= 1:
            raise ValueError("the sum of validation_fraction and test_fraction must be less than 1")
        return self

    def sources(self) -> list[tuple[str, str | None, Source]]:
        """Return all sources as (role, name, source). A single source has no name."""
        sources: list[tuple[str, str | None, Source]] = []
        for role in ("train", "validation", "test"):
            value = getattr(self, role)
            if isinstance(value, Source):
                sources.append((role, None, value))
            elif value is not None:
                sources.extend((role, name, source) for name, source in value.items())
        return sources
