"""The ``[data]`` table: the sources of preference pairs, and their partition into clients; ``[selector]``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, field_validator, model_validator

from prefed.core.strict_settings import StrictModel
from prefed.core.text import control_character


class Columns(StrictModel):
    """The names of a source's columns. A dot leads into a nested column: ``"question.full_text"``.

    Attributes:
        prompt: leave it out where chosen and rejected are whole dialogues with a common beginning.
        chosen: the preferred response.
        rejected: the other response.
        margin: how strongly it is preferred.
        client: the person or organisation that has this preference.
        category: a label within the task.
        domain: the data set that the row comes from.
        split: ``train``, ``validation`` or ``test``.
    """

    prompt: str | None = None
    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str | None = None
    client: str | None = None
    category: str | None = None
    domain: str | None = None
    split: str | None = None


class Source(StrictModel):
    """A file, a folder of files or a hub data set. A plain string in its place is its ``path``.

    Attributes:
        path: a ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` (each also ``.gz``) or ``.parquet`` file, a folder
            of such files (read in the order of their names, subfolders included), a folder that ``datasets``
            saved, or a hub name such as ``Anthropic/hh-rlhf``.
        format: how a row becomes a pair: a name of :data:`prefed.data.FORMATS` or that format's hub name.
            ``None`` takes ``data.format``.
        columns: the names of the columns, in place of a format.
        subset: hub only: the configuration or folder, e.g. ``harmless-base``.
        split: of a hub set, or of a saved one with several: the split. ``None`` takes the one of the source's
            role, e.g. ``test`` under ``data.test``.
        revision: hub only: a branch, tag or commit.
        encoding: the encoding of text files. ``None`` takes ``data.encoding``.
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
        raise ValueError("a client's name is empty")
    control = control_character(name)
    if control is not None:
        raise ValueError(f"the client's name {name!r} contains the control character {control}")
    return name


Name: TypeAlias = Annotated[str, AfterValidator(_check_name)]
"""The id of a client: text without control characters."""


class Iid(StrictModel):
    """Shuffle the pairs and cut them into equal shards, or into shards of the given ``sizes``.

    Attributes:
        clients: the number of clients.
        sizes: the relative sizes of the clients: the exponent a of a power law, so that client k's share is
            proportional to (k+1)^−a, or one positive weight per client. Absolute sizes may serve as weights.
    """

    by: Literal["iid"] = "iid"
    clients: int = Field(ge=1)
    sizes: Sizes | None = None


class ByColumn(StrictModel):
    """One client per value of a column; with ``groups``, one per named group of values.

    FedBiscuit's 53 annotators and FedPDPO's (arXiv:2603.19741) 3 or 11 programming languages.

    Attributes:
        column: the column of the values.
        groups: client → its values.
    """

    by: Literal["column"] = "column"
    column: str
    groups: dict[Name, list[str]] | None = None


class Dirichlet(StrictModel):
    """Divide each category in proportions drawn from Dir(alpha). Two clients never have the same prompt.

    FedBiscuit: SHP, alpha 0.3, 200 clients. FedSDG: alpha 0.1, 0.3 and 1.

    Attributes:
        column: the column of the categories.
        alpha: small values give each category to few clients.
        clients: the number of clients.
        share_prompts: allow two clients to have the same prompt. This suits data whose few prompts occur in
            all categories.
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
        clients: the number of clients.
        sizes: as for ``iid``.
    """

    by: Literal["margin"] = "margin"
    clients: int = Field(ge=1)
    sizes: Sizes | None = None


class BySource(StrictModel):
    """One data set per client: ``data.train`` is a table of names and sources (FedPDPO, cross-domain)."""

    by: Literal["source"] = "source"


class ByFile(StrictModel):
    """One file per client: ``data.train`` is a folder, and a client is called as its file is.

    ``ann.jsonl.gz`` belongs to client ``ann``. Files in subfolders count too; two of one name are refused.
    The folders of ``data.validation`` and ``data.test`` have files of the same names.
    """

    by: Literal["file"] = "file"


class Conflict(StrictModel):
    """Two kinds of clients with opposite preferences (FedVPA-GP: 50/50, 70/30, 30/70).

    Attributes:
        clients: the number of clients.
        ratio: the share of clients that are of the first kind.
        column: the column of two categories, e.g. helpful and harmless. A client gets pairs of one of them.
        categories: the two categories, in the order of the kinds. ``None`` takes those in the data, sorted.
        flip: in place of a column: all pairs are shuffled and divided, and clients of the second kind have
            chosen and rejected swapped.
        sizes: the relative sizes of the clients of each kind, as for ``iid``.
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
"""The ``[data.partition]`` table: how rows are assigned to clients. ``by`` names the rule."""


class SelectorConfig(StrictModel):
    """The ``[selector]`` table: how a selector is asked which of two responses is better.

    Attributes:
        template: the words around the texts. ``summary`` and ``answer`` are those of FedBiscuit's figure 4;
            ``summary`` shows the fields subreddit, title and post of a record. ``general`` is a short one for
            any pair.
        too_long: what happens to a pair that is longer than ``data.max_length``. ``shorten`` cuts the ends of
            both responses to a common number of tokens, at least 8, and then the beginning of the prompt.
            ``drop`` leaves it out and counts it, ``error`` refuses it.
    """

    template: Literal["general", "summary", "answer"] = "general"
    too_long: Literal["shorten", "drop", "error"] = "shorten"


class DataConfig(StrictModel):
    """The ``[data]`` table.

    Attributes:
        train: a source, or a table of names and sources. Each name becomes the ``domain`` of its rows.
        validation: like ``train``. These rows serve to choose a model and are never trained on.
        test: like ``train``. These rows serve to evaluate.
        partition: which client gets which rows. It may be left out where ``train`` is a table: then each
            source is one client.
        format: how a row becomes a pair, for all sources without a format. ``auto`` detects the known sets by
            their columns and otherwise expects prompt, chosen and rejected.
        columns: the names of the columns, in place of a format.
        encoding: the encoding of text files.
        template: how conversations are rendered. ``chat`` is the tokenizer's chat template, ``dialogue`` the
            Human/Assistant form. ``auto`` takes the first if the tokenizer has one, otherwise the second.
            ``instruction`` is the form of Alpaca and of FedBiscuit's figure 4, for prompts of a single turn.
        max_length: tokens of a prompt and the longer of its responses together. A longer prompt loses its
            beginning.
        too_long: what happens to a pair whose longer response leaves no room for a token of the prompt.
        invalid: what happens to a row with a blank response or a malformed field. ``error`` names it,
            ``drop`` leaves it out and counts it. A pair of two equal responses is always left out and
            counted.
        duplicates: what happens to a pair that occurs twice within a client (of a natural partition), or
            within the whole set (of any other). ``drop`` keeps the first, ``keep`` keeps all, ``error``
            refuses them. ``drop_tested`` is ``drop`` across clients: no client trains or is validated on a
            pair that any client is tested on, and none trains on one that any client is validated on.
        rows: the largest number of rows to read from each source, or from each client's file.
        score: the part of a text whose log-probability a loss reads. ``response`` is the usual. ``whole`` is
            prompt and response: a pair has no prompt then but the end-of-text token, and a text that is too
            long loses its end (Distributed DPO's code).
        tail_characters: with ``whole``: the last so many characters of each text are kept.
        min_characters: leave pairs out, and count them, of which a response has fewer characters; with
            ``whole`` a text.
        limit: the largest number of training pairs per client. They are drawn at random.
        validation_fraction: the share of each client's pairs to take for validation where there is no
            validation source.
        test_fraction: the share of each client's pairs to take for test. ``None`` is 0.1 where nothing else
            provides test rows. With one data set or file per client, fractions apply to the clients that the
            other tables or folders do not name.
        split_by: what stays together when a fraction is taken: equal pairs, or all pairs of a prompt.
        flip: clients whose chosen and rejected are swapped.

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
    encoding: str = "utf-8"
    template: Literal["auto", "chat", "dialogue", "instruction"] = "auto"
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

    @field_validator("train", "validation", "test", mode="before")
    @classmethod
    def _sources(cls, value: Any) -> Any:
        def one(source: Any) -> Any:
            return {"path": str(source)} if isinstance(source, str | Path) else source

        if isinstance(value, list | tuple):
            named = {Path(str(item)).name.split(".")[0]: item for item in value}
            if len(named) != len(value):
                raise ValueError(
                    "sources in a list are named after their files, but these names repeat: use a table"
                )
            value = named
        if isinstance(value, dict) and "path" not in value:
            if not value:
                raise ValueError("the table of sources is empty")
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
                'partition assigns rows to clients, e.g. {by = "iid", clients = 10}, '
                '{by = "column", column = "worker"}, or {by = "file"} for a folder with one file per client'
            )
        return values

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if isinstance(self.partition, BySource):
            if not isinstance(self.train, dict):
                raise ValueError('by = "source" needs train = {name = source, …}: one dataset per client')
            for role in ("validation", "test"):
                sources = getattr(self, role)
                if sources is not None and (not isinstance(sources, dict) or set(sources) - set(self.train)):
                    raise ValueError(
                        f'with by = "source", {role} must be a table with names from train\'s table'
                    )
        elif isinstance(self.partition, ByFile):
            for role in ("train", "validation", "test"):
                if isinstance(getattr(self, role), dict):
                    raise ValueError(f'with by = "file", {role} must be a folder with one file per client')
        else:
            for role in ("validation", "test"):
                if getattr(self, role) is not None and getattr(self, f"{role}_fraction"):
                    raise ValueError(
                        f"{role} and {role}_fraction exclude each other: {role} names separate pairs, "
                        f"{role}_fraction takes them from train. Remove one"
                    )
        if self.tail_characters is not None and self.score != "whole":
            raise ValueError('tail_characters requires score = "whole": set it, or remove tail_characters')
        by_prompt = isinstance(self.partition, Dirichlet) and not self.partition.share_prompts
        if self.score == "whole" and (by_prompt or self.split_by == "prompt"):
            raise ValueError('score = "whole" leaves no prompts to group pairs by')
        if self.validation_fraction + (self.test_fraction or 0.0) >= 1:
            raise ValueError("validation_fraction and test_fraction together must leave pairs to train on")
        return self

    def sources(self) -> list[tuple[str, str | None, Source]]:
        """All sources as (role, name, source). The name is ``None`` if the role has a single source."""
        sources: list[tuple[str, str | None, Source]] = []
        for role in ("train", "validation", "test"):
            value = getattr(self, role)
            if isinstance(value, Source):
                sources.append((role, None, value))
            elif value is not None:
                sources.extend((role, name, source) for name, source in value.items())
        return sources
