"""The ``[align]`` table, with the settings of servers that generate and of judges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from prefed.config.file import override
from prefed.core import Objective
from prefed.core.plugins import is_code
from prefed.core.strict_settings import ConfigError, StrictModel
from prefed.data import Source
from prefed.models import ModelConfig
from prefed.train.feedback import PAIRS
from prefed.train.losses import OBJECTIVES, PairLoss, objective


def _needs_only_pairs(loss: PairLoss) -> bool:
    return loss.needs_rejected and not loss.needs_reward and loss.feedback is PAIRS


POLICY_OBJECTIVES = tuple(name for name, loss in OBJECTIVES.builtin.items() if _needs_only_pairs(loss))


STEPS = 24
"""Least number of training steps, unless epochs are set."""
LABELLERS = ("majority", "mean", "minimum", "adaptive")
"""How all selectors label together; see :func:`prefed.align.labels.leads`."""
CLIENTS = "clients"
"""The labeller whose votes are the clients'."""
PEOPLE, ENDPOINT = "people", "endpoint"
"""Kinds of judges that look up what people chose, and that ask a server."""
SITE = "site"
"""The judge of clients in a federation: the one that the file of their site names."""


def judge_kind(name: str) -> str:
    """The kind of a judge.

    >>> judge_kind("endpoint:org/model:free"), judge_kind("utility")
    ('endpoint', 'utility')
    """
    return name.partition(":")[0]


URL = "https://api.openai.com/v1"
OPENAI_KEY = "OPENAI_API_KEY"
# Whoever writes an experiment file must not get any other key of the user's.
KEY = r"^(PREFED_\w*API_KEY|OPENAI_API_KEY)$"
_KEY_TEXT = (
    "environment variable with a server's key, which is never stored: OPENAI_API_KEY, which is sent only to "
    "OpenAI and to servers on this machine, or PREFED_…API_KEY, which is sent to its URL"
)


class ServerConfig(StrictModel):
    """How a server compatible with OpenAI's API is asked."""

    key_variable: str = Field(OPENAI_KEY, pattern=KEY, description=_KEY_TEXT)
    timeout: float = Field(120.0, gt=0, description="seconds to wait for a server's answer")
    parallel: int = Field(4, ge=1, description="number of concurrent requests")


class EndpointConfig(ServerConfig):
    """A server compatible with OpenAI's API (vLLM, llama.cpp and others) that generates completions.

    It receives the server's prompts only. Completions are not bit-reproducible.
    """

    model: str = Field(min_length=1, description="the name of the initial policy on that server")
    url: str = Field(description="its base URL, e.g. http://localhost:8000/v1")
    load_adapter: bool = Field(
        False,
        description="let the server load the initial policy's adapter from this machine's disk, under the "
        "name model (vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)",
    )


class JudgeOptions(ServerConfig):
    """Settings of judges. Each judge uses those that apply to it."""

    prefix: ClassVar[str] = "--"
    """Start of the settings' names, for messages."""

    url: str = Field(URL, description="base URL of an endpoint, up to and including /v1")
    template: str = Field("plain", description="prompt of a language model: plain, mt-bench or auto-j")
    judge_tokens: int = Field(1024, ge=1, description="maximum number of tokens in a judge's answer")
    key_variable: str = Field(OPENAI_KEY, description="environment variable with an endpoint's key")
    taste: str = Field(
        "mean",
        description="a client of a synthetic dataset; for selectors with a latent taste, a taste that the "
        "server knows",
    )
    device: str = Field("auto", description="device of a local model, as in [model] device")


class JudgeConfig(JudgeOptions):
    """Settings of the judges; an endpoint receives the prompts and the completions."""

    prefix: ClassVar[str] = "[align.judge] "

    key_variable: str = Field(OPENAI_KEY, pattern=KEY, description=_KEY_TEXT)


class RefreshConfig(StrictModel):
    """Clients judge the current policy's completions, and selectors take further rounds on these pairs."""

    every: int = Field(
        1, ge=1, description="generations from one refresh to the next; it precedes a generation's labels"
    )
    pairs: int = Field(
        16, ge=1, description="pairs of a generation's completions that each client judges, drawn at random"
    )
    rounds: int = Field(1, ge=1, description="further rounds of the run's method in a refresh")


class AlignConfig(StrictModel):
    """Alignment of the server's model on unlabelled prompts.

    Source: FedBiscuit (ICLR 2025), stage 2.

    >>> config = AlignConfig(prompts="prompts.jsonl")
    >>> config.prompts.path, config.completions, config.goal().name
    ('prompts.jsonl', 8, 'rpo')
    """

    prompts: Source = Field(
        description="a file, folder or hub dataset with a column prompt or with preference pairs, or a "
        ".txt file with one prompt per line; prompts that clients hold are removed and counted"
    )
    limit: int | None = Field(None, ge=1, description="maximum number of prompts; default: all")
    raw: bool = Field(
        False,
        description="use prompts without a chat template; otherwise a text becomes a user's turn if the "
        "clients' prompts are dialogues",
    )
    sft: str | None = Field(
        None,
        min_length=1,
        description="the policy to start from: a PEFT adapter's folder, or a file of rows with prompt and "
        "response (or preference pairs) to fine-tune the policy on first; default: the model itself",
    )
    sft_lr: float = Field(1e-4, gt=0, description="learning rate of that fine-tuning, by adamw")
    sft_epochs: int = Field(1, ge=1, description="epochs of that fine-tuning")
    model: ModelConfig | None = Field(None, description="the model to align; default: that of [model]")
    completions: int = Field(8, ge=2, description="completions per prompt; every two form a pair")
    max_new_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum number of tokens in a completion; default: as many as let nine in ten end, "
        "measured on some prompts first, but at most 512 and what data.max_length leaves",
    )
    temperature: float = Field(0.7, gt=0, description="sampling temperature")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the most probable tokens with this total probability"
    )
    top_k: int = Field(0, ge=0, description="sample from this many most probable tokens; 0: all")
    generate: int = Field(32, ge=1, description="completions per batch")
    endpoint: EndpointConfig | None = Field(
        None, description="a server that generates the completions; default: this process generates them"
    )
    labels: int | str = Field(
        "majority",
        description="the labeller: all selectors, by majority, mean, minimum or adaptive weights; one "
        "selector by its number; judge:NAME, a judge of `prefed judge` instead of the selectors, e.g. "
        "judge:reward:FOLDER; or clients, whose judges vote",
    )
    pairs: Literal["best", "all"] = Field(
        "best",
        description="labelled pairs to train on: best, for each prompt the one with the largest margin, "
        "usually its best completion against its worst, without near-ties, whose margin is in the lowest "
        "quarter of all pairs; or all",
    )
    judge: JudgeConfig | None = Field(None, description="settings of the judges")
    client_judge: str | None = Field(
        None,
        min_length=1,
        description="the judge with which each client judges completions on its machine, as of `prefed "
        "judge`, with the client's own taste; site: the one in its site's file, for a run over sites",
    )
    refresh: RefreshConfig | None = Field(
        None, description="clients judge completions of later policies; default: the selectors stay the same"
    )
    taste: str | None = Field(
        None,
        min_length=1,
        description="for selectors with a latent taste, the taste to label with: a client's id, "
        "prototype:K, or population, the mean of all (the default)",
    )
    tastes: Literal["posteriors", "prototypes"] | None = Field(
        None,
        description="the policy takes a taste: each prompt's taste is sampled from a client's posterior, "
        "or is a prototype, and the selector labels with it; default: the policy takes none",
    )
    generations: int | None = Field(
        None,
        ge=1,
        description="how often the policy completes the prompts and trains; default: 1, with tastes 3",
    )
    regenerate: int | None = Field(
        None,
        ge=1,
        description="training steps between two generations of completions; default: epochs passes over "
        "the labels of a generation",
    )
    objective: str = Field("rpo", description=f"loss on labelled pairs: {', '.join(POLICY_OBJECTIVES)}")
    beta: float | None = Field(
        0.1,
        gt=0,
        description="strength of the regularisation towards the initial policy; default: the objective's",
    )
    objective_settings: dict[str, float] = Field(
        default_factory=dict, description="further settings of the objective"
    )
    optimizer: Literal["adamw", "adam", "sgd", "rmsprop"] = Field("adamw", description="the optimiser")
    lr: float | None = Field(
        None, gt=0, description="learning rate; default: 0.6 / the model's hidden size, to one digit"
    )
    clip: float = Field(
        1.0, ge=0, description="bound on the gradient's Euclidean norm before each step; 0 for none"
    )
    batch_size: int = Field(8, ge=1, description="labelled pairs in a step")
    epochs: int | None = Field(
        None,
        ge=1,
        description="passes over the labelled pairs; a checkpoint after each; default: as many as make "
        f"{STEPS} steps",
    )
    held_out: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="share of the prompts held out of training; the checkpoint is kept whose answers to them "
        "the labeller prefers most often to the initial policy's; 0: the last checkpoint",
    )

    @field_validator("prompts", mode="before")
    @classmethod
    def _source(cls, value: Any) -> Any:
        return {"path": str(value)} if isinstance(value, str | Path) else value

    @field_validator("taste")
    @classmethod
    def _usual(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("infer:"):
            raise ValueError("the server has no pairs to infer a taste from: name a client, or prototype:K")
        return None if value == "population" else value

    @model_validator(mode="after")
    def _consistent(self) -> AlignConfig:
        number = isinstance(self.labels, int) and self.labels >= 0
        if not number and self.labels not in (*LABELLERS, CLIENTS) and not self.judge_name:
            raise ValueError(
                f"labels must be {', '.join(LABELLERS)}, a selector's number from 0, judge:NAME, or {CLIENTS}"
            )
        for key, judge in self.judges.items():
            if is_code(judge) and "." in judge_kind(judge):
                raise ValueError(
                    f"{key} = {getattr(self, key)!r}: an alignment does not load a judge from a file or "
                    "module; use one of prefed, or install a package with an entry point in 'prefed.judges' "
                    "and name that"
                )
        if self.judge is not None and not self.judges:
            raise ValueError(
                f"[align.judge] requires client_judge or labels = 'judge:NAME', not {self.labels!r}: "
                "remove one"
            )
        self._check_clients()
        if self.taste is not None and not self.selectors_label:
            raise ValueError(f"taste requires selectors, but labels = {self.labels!r}: remove one of them")
        if self.tastes is not None and (not self.selectors_label or self.taste is not None):
            given = f"labels = {self.labels!r}" if self.taste is None else f"taste = {self.taste!r}"
            raise ValueError(f"with tastes, the selector labels with the sampled taste: remove {given}")
        if self.regenerate is not None and self.tastes is None and self.generations is None:
            raise ValueError("regenerate requires several generations: set generations, or remove it")
        if self.endpoint is not None and (self.tastes is not None or self.generations is not None):
            raise ValueError("with tastes or generations, completions are generated here: remove endpoint")
        if self.endpoint is not None and self.endpoint.load_adapter and self.sft is None:
            raise ValueError("without sft the initial policy has no adapter: remove endpoint.load_adapter")
        if self.model is not None and self.model.train == "full":
            raise ValueError("model.train = 'full': the alignment trains a LoRA: remove it")
        if self.objective in ("grpo", "par") and self.pairs != "all":
            raise ValueError(f"objective {self.objective!r} compares all completions: set pairs = 'all'")
        if "beta" in self.objective_settings:
            raise ValueError("beta is a separate key: move it out of objective_settings")
        self.goal()
        return self

    def _check_clients(self) -> None:
        """Check who judges what, where clients do."""
        judging = self.labels == CLIENTS or self.refresh is not None
        if judging and self.client_judge is None:
            raise ValueError("clients judge completions: name the judge that each of them uses: client_judge")
        if not judging and self.client_judge is not None:
            raise ValueError(f"client_judge requires labels = '{CLIENTS}' or [align.refresh]: remove it")
        if self.labels == CLIENTS and judge_kind(self.client_judge or "") == PEOPLE:
            raise ValueError(
                f"labels = '{CLIENTS}' has votes on every pair of completions, which people do not give: "
                "let them judge in [align.refresh], or use another client_judge"
            )
        if self.refresh is None:
            return
        if self.generations is None:
            raise ValueError("[align.refresh] requires several generations: set generations")
        if self.labels == CLIENTS or self.judge_name is not None or self.tastes is not None:
            given = f"labels = {self.labels!r}" if self.tastes is None else f"tastes = {self.tastes!r}"
            raise ValueError(f"[align.refresh] trains the selectors that label: remove it or {given}")

    @property
    def judges(self) -> dict[str, str]:
        """Key → name of each judge on this machine."""
        named = {"labels": self.judge_name, "client_judge": self.client_judge}
        return {key: name for key, name in named.items() if name and name != SITE}

    @property
    def judge_kinds(self) -> frozenset[str]:
        """The kinds of the judges on this machine."""
        return frozenset(map(judge_kind, self.judges.values()))

    @property
    def judge_options(self) -> JudgeConfig:
        """The settings of the judges, given or default."""
        return self.judge or JudgeConfig()

    @property
    def selectors_label(self) -> bool:
        """Whether selectors label, not a judge or clients."""
        return self.judge_name is None and self.labels != CLIENTS

    def refreshed(self, generation: int) -> int:
        """Return the last generation up to this one with a refresh; 0 for none.

        >>> config = AlignConfig.model_construct(refresh=RefreshConfig(every=2))
        >>> [config.refreshed(generation) for generation in range(1, 6)]
        [0, 2, 2, 4, 4]
        """
        return 0 if self.refresh is None else generation // self.refresh.every * self.refresh.every

    @property
    def judge_name(self) -> str | None:
        """The judge that labels, without ``judge:``; ``None`` if the selectors label."""
        kind, _, name = str(self.labels).partition(":")
        return name if kind == "judge" else None

    def check_tastes(self, method: str, has_tastes: bool) -> None:
        """Reject ``taste`` and ``tastes`` for a method without a latent taste.

        Raises:
            ValueError: a key requires a latent taste, and the method has none.
        """
        for key, value in (("taste", self.taste), ("tastes", self.tastes)):
            if value is not None and not has_tastes:
                raise ValueError(
                    f"[align] {key} = {value!r}: {method} has no latent taste; use fedvpl or fedvpa, or "
                    "remove the key"
                )

    def epochs_for(self, pairs: int) -> int:
        """The number of epochs for a number of labelled pairs.

        >>> AlignConfig(prompts="prompts.jsonl").epochs_for(STEPS * 4)
        2
        """
        if self.regenerate is not None:
            return 1
        return self.epochs or math.ceil(STEPS / math.ceil(pairs / self.batch_size))

    def goal(self) -> Objective:
        """The objective with all its settings.

        Raises:
            ValueError: the objective is unknown or needs more than labelled pairs, or has no such setting.
        """
        loss = objective(self.objective)
        if not _needs_only_pairs(loss):
            raise ValueError(
                f"objective {self.objective!r} cannot train on labelled pairs; choose from: "
                + ", ".join(POLICY_OBJECTIVES)
            )
        own = {} if self.beta is None else {"beta": self.beta}
        return Objective(self.objective, loss.resolve({**own, **self.objective_settings}))


class _Tables(StrictModel):
    align: AlignConfig


def align_settings(
    stored: Mapping[str, Any] | None, overrides: Sequence[str], folder: Path, file: Path | None = None
) -> AlignConfig:
    """Apply overrides to an ``[align]`` table.

    An override with an empty value resets the key to its default. ``taste``, ``tastes`` and a judge in
    ``labels`` exclude each other: overriding one of them drops the others.

    Args:
        stored: the table, if there is one.
        overrides: ``"align.KEY=VALUE"`` each.
        folder: where to look up relative paths that are not in the working folder.
        file: file of ``stored``, for messages; default: ``folder``.

    Raises:
        ConfigError: there are no prompts, a key is unknown, or a value is invalid.
    """
    tables: dict[str, Any] = {"align": dict(stored or {})}
    origins = override(tables, overrides, folder)
    _drop_conflicts(tables["align"], {keys[1] for keys in origins if keys[0] == "align" and len(keys) > 1})
    if "prompts" not in tables["align"]:
        raise ConfigError(f"{folder}: no [align] table: name the server's prompts with --prompts FILE")
    from prefed.config.errors import validate

    return validate(_Tables, tables, f"[align] of {file or folder}", origins).align


def _drop_conflicts(table: dict[str, Any], given: Set[str]) -> None:
    """Drop stored keys that conflict with the overridden keys ``given``, and keys overridden with ""."""
    for key in given & AlignConfig.model_fields.keys():
        if table.get(key) == "":
            del table[key]
    judged = judge_kind(str(table.get("labels", ""))) == "judge"
    labelling, tasting = {"labels"} if judged else set[str](), {"tastes", "generations", "regenerate"}
    dropped = set[str]()
    if "tastes" in given:
        dropped |= {"taste"} | labelling if "tastes" in table else tasting
    if "taste" in given and table.get("taste", "population") != "population":
        dropped |= tasting | labelling
    if judged and "labels" in given:
        dropped |= {"taste"} | tasting
    if "labels" in (given if not judged else dropped) and "client_judge" not in table:
        dropped |= {"judge"}
    for key in dropped - given:
        table.pop(key, None)
