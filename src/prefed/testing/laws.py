"""Laws that every method holds, on small problems. Each check raises ``AssertionError`` if its law is broken.

The problems are federations of quadratics (:mod:`prefed.testing.quadratics`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import torch
from pydantic import ValidationError

from prefed.core import (
    Download,
    Entry,
    Key,
    Method,
    Owner,
    Phase,
    PhaseResult,
    Privacy,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.core.wire import decode_download, decode_state, decode_upload, encode, outline_upload
from prefed.engines.validation import validate_upload, withhold_scalars
from prefed.merge import Aggregator, MergeConfig, lora
from prefed.merge.config import LoraRule
from prefed.methods import MethodKind, TrainingSettings
from prefed.testing.quadratics import Quadratic, QuadraticTrainer, Run, crowd, initial, simulate

RULES: tuple[LoraRule, ...] = get_args(LoraRule)
MARK_BYTES = bytes.fromhex("5ac36996a53cf13f")
MARK: float = struct.unpack("<d", MARK_BYTES)[0]
"""An ordinary number, 1.0772…, whose bytes no message contains by chance."""


@dataclass(frozen=True)
class Problem:
    """A method on a federation of quadratics.

    Attributes:
        settings: its settings that differ from their defaults.
        size: number of clients; see :func:`~prefed.testing.crowd`.
        rounds: number of rounds of the run.
        seed: seed of model, clients and batches.
        blocks: number of blocks of the model.
        change: applied to the method that is built.
    """

    kind: MethodKind
    settings: Mapping[str, Any] = field(default_factory=dict)
    merge: MergeConfig = field(default_factory=MergeConfig)
    size: int = 3
    rounds: int = 3
    seed: int = 0
    blocks: int = 2
    change: Callable[[Method], Method] = lambda method: method

    @cached_property
    def chosen(self) -> TrainingSettings:
        """The settings of the method."""
        return self.kind.Settings(**self.settings)

    @cached_property
    def initial(self) -> Tensors:
        """Initial tensors with the parts that the method and the merge rule need."""
        return initial(self.kind.needs(self.chosen) | lora.needs(self.merge.lora), self.blocks, self.seed)

    @cached_property
    def clients(self) -> dict[str, Quadratic]:
        """Client → its data."""
        return crowd(self.size, self.initial.layout.size, self.seed)

    def build(self) -> Method:
        """Return the method, built anew."""
        layout = self.initial.layout
        aggregator = Aggregator(self.merge, layout, 2.0)
        return self.change(self.kind.build(self.chosen, layout, aggregator, self.rounds))

    def run(self, rounds: int | None = None, **options: Any) -> Run:
        """Run the method; see :func:`~prefed.testing.simulate` for ``options``."""
        done = self.rounds if rounds is None else rounds
        try:
            return simulate(self.build(), self.clients, self.initial, done, seed=self.seed, **options)
        except Exception as error:
            error.add_note(f"({self})")
            raise

    def __str__(self) -> str:
        own = ", ".join(f"{name} = {value!r}" for name, value in self.settings.items())
        return f"{self.kind.name} under [merge] lora = {self.merge.lora!r}" + (f" with {own}" if own else "")


def _require(holds: object, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def check_kind(kind: MethodKind, settings: Mapping[str, Any] | None = None) -> None:
    """Every setting has a default and a description, and the method is what its kind declares."""
    try:
        default = kind.Settings()
        again = kind.Settings(**default.model_dump(exclude_none=True))
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, each['loc']))} ({each['msg']})" for each in error.errors()]
        text = f"{kind.name}: settings need valid defaults: {', '.join(wrong)}"
        raise AssertionError(text) from error
    _require(again == default, f"{kind.name}: Settings() differs from the settings read back from its values")
    for name, setting in kind.Settings.model_fields.items():
        place = f"{kind.name}: setting {name}"
        _require(setting.description, f"{place} has no description; add Field(…, description=…)")
        given = setting.get_default(call_default_factory=True)
        same = getattr(default, name) == given
        _require(same, f"{place} is {getattr(default, name)!r} by default, but declares {given!r}")
    problem = Problem(kind, settings or {})
    method = problem.build()
    for name in ("name", "source", "personal", "reads"):
        declared, built = getattr(kind, name), getattr(method, name)
        text = f"{kind.name}: {name} is {declared!r} in MethodKind or its module, but {built!r} in the method"
        hint = "; pass it to fedavg.method if no tensor is personal" if name == "personal" else ""
        _require(declared == built, text + hint)
    method.ownership.check(problem.initial.layout)


def check_resume(problem: Problem) -> None:
    """A run stopped after every round and resumed equals the uninterrupted run, bit for bit.

    States go through bytes, and each sitting builds the method anew: only states survive. Messages survive
    encoding, too.
    """
    whole, parts = problem.run(), problem.run(1)
    for rounds in range(2, problem.rounds + 1):
        parts.server = decode_state(encode(parts.server))
        parts.private = {client: decode_state(encode(state)) for client, state in parts.private.items()}
        parts = problem.run(rounds, run=parts)
    hint = "whatever a method remembers must be in a State"
    same = encode(parts.server) == encode(whole.server)
    _require(same, f"{problem}: a resumed run has another server state; {hint}")
    for client, state in whole.private.items():
        same = encode(parts.private[client]) == encode(state)
        _require(same, f"{problem}: a resumed run has another private state of {client}; {hint}")
    for upload in whole.uploads:
        data = encode(upload)
        _require(encode(decode_upload(data)) == data, f"{problem}: an upload changes in encoding")
        sizes = {name: tensors.flat.numel() for name, tensors in upload.tensors.items()}
        outline = (sizes, upload.weight, upload.scalars)
        _require(outline_upload(data) == outline, f"{problem}: the outline of an upload is wrong")
    for download in whole.downloads:
        data = encode(download)
        _require(encode(decode_download(data)) == data, f"{problem}: a download changes in encoding")


def _reversed(uploads: list[Upload]) -> Sequence[Upload]:
    return uploads[::-1]


def check_order(problem: Problem, order: Callable[[list[Upload]], Sequence[Upload]] = _reversed) -> None:
    """The order in which uploads arrive changes no bit of any state in two rounds.

    Args:
        order: permutes the uploads of each exchange before they are merged.
    """
    once, again = problem.run(2), problem.run(2, order=order)
    same = encode(once.server) == encode(again.server)
    _require(
        same,
        f"{problem}: the merge depends on the order of uploads; take them from prefed.merge.sort_uploads",
    )
    for client, state in once.private.items():
        same = encode(again.private[client]) == encode(state)
        _require(same, f"{problem}: the private state of {client} depends on the order of uploads")


def check_few_pairs(problem: Problem) -> None:
    """The run ends with finite tensors if some clients, or all, have too few pairs to send numbers."""
    sizes = sorted(data.size for data in problem.clients.values())
    for least in (sizes[-1], sizes[-1] + 1):
        place = f"{problem} with [privacy] minimum_pairs = {least}"
        try:
            run = problem.run(privacy=Privacy(minimum_pairs=least))
        except Exception as error:
            raise AssertionError(f"{place}, uploads without numbers end the run: {error!r}") from error
        for name, group in run.server.tensors.items():
            _require(group.isfinite(), f"{place}, group {name!r} of the server is not finite")


def check_models(problem: Problem) -> None:
    """Every client has a finite model with all tensors, also before its first visit; so has a newcomer."""
    method, run = problem.build(), problem.run(2, cohort=1)
    if not method.pooled:
        for client, model in run.models(method, problem.clients, problem.initial).items():
            _check_model(problem, f"the model of {client}", model)
    now = Round(run.round, problem.rounds, Key(0), {})
    published = method.publish(run.server, "new")
    data = Quadratic.at([1.0] * problem.initial.layout.size, size=2)

    def trainer() -> QuadraticTrainer:
        return QuadraticTrainer("new", data, now, Key(problem.seed), method.ownership, problem.initial)

    if method.newcomer is not None:
        _check_model(problem, "the model of a newcomer", method.newcomer(trainer(), published))
    if method.adapt is not None:
        adapted = method.adapt(trainer(), published, 2)
        _check_model(problem, "the adapted model of a newcomer", adapted)


def _check_model(problem: Problem, what: str, model: Tensors) -> None:
    whole = model.layout == problem.initial.layout
    _require(whole, f"{problem}: {what} does not have all tensors of the model")
    _require(model.isfinite(), f"{problem}: {what} is not finite")


def check_messages(problem: Problem, stays: Callable[[Entry], bool] = lambda entry: False) -> None:
    """Only what is declared leaves a client.

    1. Uploads contain shared tensors and declared numbers, and downloads shared tensors.
    2. No tensor for which ``stays`` holds is in any message.
    3. The bytes of a trained personal tensor are in no encoded message.
    4. Each upload is what exactly one exchange declares, so a server accepts it.
    """
    method, start = problem.build(), problem.initial
    shared, personal = set(method.ownership.names(Owner.SHARED)), method.ownership.names(Owner.PERSONAL)
    numbers = frozenset().union(*(exchange.scalars for exchange in method.exchanges))
    secrets: list[bytes] = []
    run: Run | None = None
    for rounds in range(1, problem.rounds + 1):
        run = problem.run(rounds, run=run)
        for state in run.private.values():
            for group in state.tensors.values():
                secrets += [
                    group[name].contiguous().numpy().tobytes()
                    for name in personal
                    if name in group and not torch.equal(group[name], start[name])
                ]
    assert run is not None
    messages: list[Upload | Download] = [*run.uploads, *run.downloads]
    for message in messages:
        # Peers are clients' posteriors, row by row.
        names = {name for group, tensors in message.tensors.items() if group != "peers" for name in tensors}
        _require(names <= shared, f"{problem}: {sorted(names - shared)} left a client, but is not shared")
        private = sorted(name for name in names if stays(start.layout[name]))
        _require(not private, f"{problem}: {private} must stay on the client")
        data = encode(message)
        found = any(secret in data for secret in secrets)
        _require(not found, f"{problem}: a personal tensor's bytes left the client under another name")
    weights = {upload.client: upload.weight for upload in run.uploads}
    for upload in run.uploads:
        undeclared = set(upload.scalars) - numbers
        _require(not undeclared, f"{problem}: undeclared numbers {sorted(undeclared)}; see Exchange.scalars")
        now = Round(upload.sent_at, problem.rounds, Key(0), weights)
        reasons = []
        for exchange in method.exchanges:
            sent = withhold_scalars(upload, upload.client, exchange, now)
            reasons.append(validate_upload(sent, upload.client, exchange, method.ownership, start, now))
        refusal = f"{problem}: a server refuses an upload: {'; '.join(filter(None, reasons))}"
        _require(reasons.count("") == 1, refusal)
    kept = bool(secrets) == bool(personal)
    _require(kept, f"{problem}: no trained personal tensor is in a private state, though some are personal")


class _MarkedTrainer(QuadraticTrainer):
    """Training that does not change marked numbers."""

    def train(self, tensors: Tensors, phase: Phase) -> PhaseResult:
        result = super().train(tensors, phase)
        flat = torch.where(tensors.flat == MARK, tensors.flat, result.tensors.flat)
        return replace(result, tensors=Tensors(tensors.layout, flat))


def _marked(tensors: Tensors, names: Collection[str]) -> Tensors:
    return tensors.replace({name: torch.full_like(tensors[name], MARK) for name in names})


def check_private_bytes(
    problem: Problem, private: Collection[str] | None = None, sent: Collection[str] = ()
) -> None:
    """No private number is in any message: each of them is set to one recognisable number, a mark.

    The initial values of private tensors, and all numbers in a client's private state before each visit, are
    marks, and training does not change marks. Then no message of three rounds contains a mark, in bytes or in
    digits. Each upload also passes validation.

    Args:
        private: tensors that must stay; by default those that the method declares as personal.
        sent: groups of private states with tensors that the client has sent before; they get no marks.
    """
    method = problem.build()
    if private is None:
        private = method.ownership.names(Owner.PERSONAL)
    for message in _marked_messages(problem, method, private, sent):
        _require(MARK_BYTES not in message, f"{problem}: private bytes in a message")
        _require(repr(MARK).encode() not in message, f"{problem}: a private number in a message")


def _marked_messages(
    problem: Problem, method: Method, private: Collection[str], sent: Collection[str]
) -> Iterator[bytes]:
    """Every message in both directions, and what is published."""
    start = _marked(problem.initial, private)
    clients = dict(list(problem.clients.items())[:1]) if method.pooled else problem.clients
    weights = {client: float(data.size) for client, data in clients.items()}
    server = method.init_server(start)
    states = {client: method.init_client(start, client) for client in clients}
    for number in range(1, problem.rounds + 1):
        now = Round(number, problem.rounds, Key(problem.seed).at("round", number), weights)
        for exchange in method.exchanges:
            if not exchange.due(number):
                continue
            uploads = []
            for client, data in clients.items():
                download = exchange.send(server, client, now)
                yield encode(download)
                key = now.key.at("client", client)
                trainer = _MarkedTrainer(client, data, now, key, method.ownership, start)
                upload, states[client] = exchange.work(trainer, _secret(states[client], sent), download)
                upload = withhold_scalars(upload, client, exchange, now)
                yield encode(upload)
                reason = validate_upload(upload, client, exchange, method.ownership, start, now)
                _require(not reason, f"{problem}: a server refuses an upload: {reason}")
                uploads.append(upload)
            server, _ = exchange.merge(server, uploads, now)
        for client in clients:
            yield encode(method.publish(server, client))


def _secret(state: State, sent: Collection[str]) -> State:
    """A client's private state with the mark in all tensors and numbers, except in the groups ``sent``."""
    values = {key: MARK if isinstance(value, float) else value for key, value in state.values.items()}
    groups = {key: group if key in sent else _marked(group, group) for key, group in state.tensors.items()}
    return State(groups, values)
