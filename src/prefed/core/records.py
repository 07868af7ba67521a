"""Schemas of the output of a run: a line of ``rounds.jsonl``, and ``summary.json``.

Methods, merge rules and engines may add their own entries to both. Entries that a run does not have are
absent.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, NotRequired, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict

Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Block = Annotated[str, Field(pattern=r"^\d+$")]


class FederatedMetric(TypedDict):
    """A metric over clients. Metrics in files are shares of a client's pairs.

    ``worst`` is the lowest value of a client, or the highest for a loss. ``worst_decile`` is the mean of the
    worst tenth of the clients, at least one. ``per_client`` contains the value of each client.

    Clients with fewer pairs than ``[privacy] minimum_pairs`` count in ``mean`` only, and ``mean_alone`` is
    their number. If together they have fewer than ``minimum_pairs`` pairs, ``mean`` excludes them too, and
    ``left_out`` is their number. Both keys are absent if there are no such clients.

    Under distributed noise only the mean is known: ``per_client`` is empty, ``worst`` and ``worst_decile``
    are absent, and ``noise`` is the standard deviation of the noise in ``mean``.
    """

    mean: Share
    worst: NotRequired[Share]
    worst_decile: NotRequired[Share]
    per_client: dict[str, Share]
    mean_alone: NotRequired[int]
    left_out: NotRequired[int]
    noise: NotRequired[Amount]


def metrics_of_clients(content: Mapping[str, Any]) -> dict[str, FederatedMetric]:
    """Return the per-client metrics of a summary or an evaluation, by name."""
    return {name: value for name, value in content.items() if is_metric(value)}


def is_metric(value: Any) -> bool:
    """Return whether an entry of a summary or an evaluation is a :class:`FederatedMetric`."""
    return isinstance(value, Mapping) and isinstance(value.get("per_client"), Mapping)


class Dropped(TypedDict):
    """An upload that was not merged."""

    client: str
    exchange: NotRequired[str]
    reason: str


class Visit(TypedDict):
    """A visit of a ``[fleet]``: how many rounds late its upload was merged, and when it started and ended.

    Times are virtual seconds since the start of the run.
    """

    client: str
    late: int
    asked: float
    at: float


@with_config(ConfigDict(strict=True))
class RoundRecord(TypedDict):
    """Record of a committed round: what :meth:`~prefed.core.Callback.on_round_end` receives.

    Every record has ``round``, ``loss``, ``bytes_up``, ``bytes_down``, ``seconds``, ``cohort`` and
    ``dropped``. ``evaluation`` contains the metrics if the round was evaluated: per-client metrics as
    :class:`FederatedMetric`, others as means. ``time`` is the virtual time of a ``[fleet]`` in seconds. In
    ``rounds.jsonl``, ``None`` replaces numbers that are not finite.
    """

    round: int
    loss: NotRequired[float | None]
    preference_accuracy: NotRequired[float | None]
    reward_accuracy: NotRequired[float | None]
    chosen_shift: NotRequired[float | None]
    rejected_shift: NotRequired[float | None]
    evaluation: NotRequired[dict[str, Any]]
    epsilon: NotRequired[float | None]
    validation: NotRequired[float | None]
    bytes_up: Amount
    bytes_down: Amount
    seconds: NotRequired[float]
    time: NotRequired[float]
    cohort: NotRequired[list[str]]
    dropped: NotRequired[list[Dropped]]
    visits: NotRequired[list[Visit]]
    lost: NotRequired[list[Visit]]
    staleness: NotRequired[float]
    offences: NotRequired[dict[str, int]]
    set_aside: NotRequired[list[str]]
    stacked_steps: NotRequired[dict[str, int]]
    paper_gap: NotRequired[float]
    gradient_norm: NotRequired[float]
    kappa2: NotRequired[float]
    zeta2: NotRequired[float]
    rho: NotRequired[float]


class Traffic(TypedDict):
    """Bytes of all messages from clients (``up``) and to clients (``down``)."""

    up: Amount
    down: Amount


class Hardware(TypedDict, total=False):
    """Hardware that a run used."""

    processor: str
    cores: int | None
    memory_mb: int | None
    devices: list[str]
    system: str


class Origin(TypedDict, total=False):
    """When a run finished, with which command and on which machine."""

    finished: Annotated[str, AfterValidator(datetime.fromisoformat)]
    command: Annotated[str, AfterValidator(shlex.split)]
    hardware: Hardware
    code: dict[str, dict[str, str]]
    method: dict[str, str]


class Parameters(TypedDict):
    """Numbers of parameters that a client trains, and that an upload has."""

    trainable: int
    communicated: int


class DataFigures(TypedDict, total=False):
    """Rows used and dropped, and differences between clients (:func:`prefed.runs.summary.describe_data`)."""

    rows: int
    pairs: int
    dropped: dict[str, int]
    cut: int
    shortened: int
    category_distance: float | None
    random_category_distance: float | None
    token_distance: float | None
    random_token_distance: float | None
    shared_prompts: int | None
    contradictions: int | None


class TextHealth(TypedDict):
    """Health of the answers of a model, or of several (:data:`prefed.train.metrics.TEXT_METRICS`).

    ``answers`` is their number, ``surprise_band`` the 10th and 90th percentile of surprise over them.
    ``per_client`` contains the health of each client's own answers. ``chosen_surprise`` of the base model is
    the 90th percentile over the chosen responses to the same prompts.
    """

    answers: Annotated[int, Field(ge=1)]
    ends: Share
    loops: Share
    distinct_2: Share
    length: Amount
    empty: Share
    surprise: float
    surprise_band: Annotated[list[float], Field(min_length=2, max_length=2)]
    per_client: NotRequired[dict[str, TextHealth]]
    chosen_surprise: NotRequired[float]


class TextRecord(TypedDict):
    """Health of text: of the base model, of the shared one, and of the clients' own, each on its prompts."""

    base: TextHealth
    shared: NotRequired[TextHealth]
    own: NotRequired[TextHealth]


@with_config(ConfigDict(strict=True))
class Summary(TypedDict):
    """Contents of ``summary.json``.

    Metrics that no code reads by name are in :data:`prefed.train.metrics.TABLE` only. ``clients`` contains
    the number of pairs of each client by split. ``personal`` contains metrics of private states by block:
    metric → client → block → number.
    """

    method: str
    rounds: Annotated[int, Field(ge=1)]
    selectors: NotRequired[list[str]]
    seed: NotRequired[int]
    preference_accuracy: FederatedMetric
    baseline_accuracy: NotRequired[FederatedMetric]
    shared_accuracy: NotRequired[FederatedMetric]
    reward_accuracy: NotRequired[FederatedMetric]
    combined_accuracy: NotRequired[FederatedMetric]
    explicit_accuracy: NotRequired[FederatedMetric]
    agreement: NotRequired[FederatedMetric]
    majority_accuracy: NotRequired[FederatedMetric]
    unseen_accuracy: NotRequired[dict[str, FederatedMetric]]
    unseen_selectors: NotRequired[dict[str, FederatedMetric]]
    margin: NotRequired[float | None]
    explicit_margin: NotRequired[float | None]
    text: NotRequired[TextRecord]
    split: NotRequired[str]
    left_out: NotRequired[int]
    not_evaluated: NotRequired[dict[str, str]]
    not_finite: NotRequired[dict[str, float]]
    loss: NotRequired[float | None]
    time: NotRequired[float]
    gradient_norm: NotRequired[float]
    paper_gap: NotRequired[float]
    privacy: NotRequired[dict[str, Any]]
    stop: NotRequired[dict[str, Any]]
    personal: NotRequired[dict[str, dict[str, dict[Block, float | None]]]]
    parameters: NotRequired[Parameters]
    bytes: Traffic
    seconds: Amount
    peak_memory_mb: NotRequired[float]
    dropped: NotRequired[int]
    set_aside: NotRequired[dict[str, int]]
    clients: NotRequired[dict[str, dict[str, Count]]]
    versions: NotRequired[dict[str, str]]
    data: NotRequired[DataFigures]
    origin: NotRequired[Origin]
    sites: NotRequired[dict[str, list[str]]]
    peer: NotRequired[str]
    peers: NotRequired[list[str]]


Point = Annotated[list[float], Field(min_length=2, max_length=2)]
PromptTurns: TypeAlias = str | list[dict[str, str]]


class TasteMap(TypedDict):
    """The means of the posteriors of clients, and the prototypes, on a plane; its shares of the variance."""

    clients: list[Point]
    prototypes: list[Point]
    shares: Point


@with_config(ConfigDict(strict=True))
class Tastes(TypedDict):
    """Contents of ``tastes.json``; see ``TasteFigures`` of :mod:`prefed.runs.tastes`."""

    clients: Annotated[list[str], Field(min_length=1)]
    own: float
    another: float | None
    population: float
    sent: NotRequired[float | None]
    collapsed: bool
    accuracies: list[list[float]]
    active_units: int
    kl_per_dimension: list[float]
    map: TasteMap
    prototypes: dict[str, int]
    trust: dict[str, dict[str, float]]
    trainable_share: NotRequired[float | None]
    met: NotRequired[float]


class Rate(TypedDict):
    """A win rate with its 95% interval."""

    mean: float
    low: float
    high: float


class WinRates(TypedDict):
    """The results of a comparison; see :class:`prefed.train.metrics.winrate.WinRate`."""

    prompts: NotRequired[int]
    win_rate: Rate
    wins: float
    length_controlled: float | None
    ties: int
    judged: int
    failed: int
    left_out: NotRequired[int]
    note: str


@with_config(ConfigDict(strict=True))
class Judged(WinRates):
    """Contents of ``summary.json`` of a judge's comparison, after ``round``."""

    name: str
    judge: str
    taste: NotRequired[str | None]
    model: str
    against: str
    round: NotRequired[int | None]


@with_config(ConfigDict(strict=True))
class VerdictRow(TypedDict):
    """A row of ``verdicts.jsonl``."""

    row: int
    prompt: PromptTurns
    text: str
    against: str
    outcome: NotRequired[float | None]
    result: str
    first: NotRequired[dict[str, Any]]
    second: NotRequired[dict[str, Any]]


@with_config(ConfigDict(strict=True))
class GenerationAnswers(TypedDict):
    """A row of ``answers.jsonl`` of an alignment: answers of the initial policy and of each generation."""

    prompt: PromptTurns
    answers: list[str]


@with_config(ConfigDict(strict=True))
class LabelRow(TypedDict):
    """A row of ``labels.jsonl``: a labelled pair of completions of prompt ``index``."""

    prompt: PromptTurns
    chosen: str
    rejected: str
    ended: NotRequired[Sequence[bool]]
    votes: Annotated[list[int], Field(min_length=2, max_length=2)]
    margin: float
    index: int
