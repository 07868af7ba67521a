"""The server's step from uploads to its next shared tensors, as the ``[merge]`` table describes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefed.core import Entry, Layout, Owner, Ownership, Round, State, Tensors, Upload
from prefed.merge import lora, optimizers, robust
from prefed.merge.checks import BadUpload, TooFewUploads, proportion
from prefed.merge.config import MergeConfig
from prefed.merge.flat import combine
from prefed.merge.means import ordered, remainder, shares

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FIGURES", "Aggregator", "Weigh"]

Weigh = Callable[[Mapping[str, Tensors]], Mapping[str, float]]
"""Client → update φ_i − φ, as the robust rule leaves them; client → weight of the mean."""

FIGURES = ("merged", "update_norm", "product_error", "truncation_error", "clipped")
"""What a merge may report:

- ``merged``: uploads that counted, after the rule dropped any.
- ``update_norm``: Euclidean length of the step that the shared tensors took, residuals left out.
- ``product_error``: what averaging A and B apart gets wrong, see :func:`prefed.merge.lora.product_error`.
- ``truncation_error``: share of the mean product that ``flexlora`` cannot keep.
- ``clipped``: share of the uploads that ``norm_clip`` shortened.
"""


@dataclass(frozen=True)
class Aggregator:
    """How uploads become the server's next model.

    Attributes:
        config: the rules.
        layout: the model's movable tensors.
        scaling: s = α / rank of its LoRA, used by ``fedex`` alone.

    >>> import torch
    >>> from prefed.core import Key
    >>> layout = Layout((Entry("lora/0/q/A", (1, 2), "lora", 0, "A"),))
    >>> aggregator = Aggregator(MergeConfig(weights="uniform"), layout, 2.0)
    >>> state = aggregator.init(Tensors.zeros(layout))
    >>> def reply(client, x, y):
    ...     return Upload(client, 1, {"model": Tensors(layout, torch.tensor([x, y]))}, sent_at=1)
    >>> now = Round(1, 10, Key(0), {"a": 1, "b": 1})
    >>> aggregator.merge(state, [reply("a", 1.0, 0.0), reply("b", 3.0, 0.0)], now).tensors["model"].flat
    tensor([2., 0.])
    """

    config: MergeConfig
    layout: Layout
    scaling: float

    def owner(self, entry: Entry) -> Owner:
        """Who owns ``entry`` in a method that would share it."""
        return lora.owner(self.config.lora, entry)

    def ownership(self, owner: Callable[[Entry], Owner] = lambda entry: Owner.SHARED) -> Ownership:
        """The parts in which what ``owner`` would share belongs to whom the LoRA rule says.

        A residual is shared if its module's factors are, whatever ``owner`` says of it.
        """
        wanted = {entry.name: owner(entry) for entry in self.layout.entries}
        for module in lora.modules(self.layout):
            if module.residual in wanted:
                both = {wanted[module.a], wanted[module.b]} == {Owner.SHARED}
                wanted[module.residual] = Owner.SHARED if both else Owner.FROZEN

        def refined(entry: Entry) -> Owner:
            mine = wanted[entry.name]
            return self.owner(entry) if mine is Owner.SHARED else mine

        return Ownership.of(self.layout, refined)

    def trainable(self, ownership: Ownership, round_number: int) -> tuple[str, ...]:
        """The shared and personal tensors that train in a round; the LoRA rule rests shared ones alone."""
        shared = ownership.names(Owner.SHARED)
        resting = set(shared) - set(lora.trainable(self.config.lora, shared, self.layout, round_number))
        return tuple(name for name in ownership.names(Owner.SHARED, Owner.PERSONAL) if name not in resting)

    def init(self, shared: Tensors, group: str = "model") -> State:
        """A server's first state: ``shared`` in ``group``, and the optimiser's memory.

        Raises:
            ValueError: ``fedex`` is asked of a model that has LoRA modules without a residual.
        """
        if self.config.lora == "fedex":
            missing = [
                module.residual
                for module in lora.modules(shared.layout)
                if module.residual not in shared.layout
            ]
            if missing:
                raise ValueError(
                    f"lora 'fedex' needs a dense residual for each LoRA module, and the model lacks "
                    f"{missing[0]} and {len(missing) - 1} more; build it with the part {lora.RESIDUAL!r}"
                )
        memory = optimizers.slots(self.config.optimizer, _learnt(shared))
        return State({group: shared, **{_slot(name, group): value for name, value in memory.items()}})

    def merge(
        self,
        state: State,
        uploads: Sequence[Upload],
        now: Round,
        group: str = "model",
        weigh: Weigh | None = None,
        names: Iterable[str] | None = None,
    ) -> State:
        """The server's next state.

        In this order: robust rule, weights and staleness discount, LoRA rule, server optimiser. Uploads
        without ``group`` take no part; where none has it the state is returned as it is. Tensors that are
        not merged keep their values, and so does every residual but for ``fedex``'s own correction.

        Args:
            state: as :meth:`init` or the last merge gave it.
            uploads: in any order.
            now: the round they are merged in.
            group: which of the uploads' groups to merge into which group of the state.
            weigh: gives weights of the mean in place of the configured ones (e.g.
                :func:`prefed.merge.alignment_weights`), from the updates that the robust rule let through.
            names: the tensors of the group that are merged; all of the state's unless given. Each upload
                must hold exactly these, residuals apart.

        Raises:
            BadUpload: an upload holds other tensors, or one of another shape.
            ValueError: too few uploads for the rule, or weights that cannot serve.
        """
        replies = [upload for upload in ordered(uploads) if group in upload.tensors]
        whole = state.tensors[group]
        current, values = _aligned(whole, replies, group, whole if names is None else names)
        if not values or not current.layout.entries:
            return state
        late = [self.config.staleness.discount(max(0, now.number - upload.sent_at)) for upload in replies]
        chosen, values, figures = self._robust(current, values, self.config.max_norm)
        replies, late = [replies[k] for k in chosen], [late[k] for k in chosen]
        raw = self._weights(replies, now) if weigh is None else self._given(weigh, current, replies, values)
        masses = [weight * discount for weight, discount in zip(raw, late, strict=True)]
        if self.config.weights == "mass":
            values, masses = [current, *values], [remainder(masses), *masses]
        else:
            masses = shares(masses)
        merged = self._center(values, masses)
        changes = self._lora(whole, merged, values, masses, figures)
        merged = merged.replace({name: value for name, value in changes.items() if name in merged})
        memory = {
            name: state.tensors[_slot(name, group)]
            for name in optimizers.slots(self.config.optimizer, current)
        }
        before = {name: value.select(current) for name, value in memory.items()}
        moved, after = optimizers.step(self.config.optimizer, current, merged, before)
        figures["update_norm"] = (moved - current).norm()
        new = whole.replace(moved).replace({name: v for name, v in changes.items() if name not in moved})
        kept = {_slot(name, group): memory[name].replace(value) for name, value in after.items()}
        report = {_value(name, group): figures.get(name) for name in FIGURES}
        return state.update({group: new, **kept}, report)

    def proportionate(
        self,
        merge: Callable[[State, Sequence[Upload], Round], State],
        steps: Collection[str] = (),
    ) -> Callable[[State, Sequence[Upload], Round], State]:
        """``merge``, refusing an upload whose size is out of all proportion, as ``max_ratio`` says.

        See :func:`prefed.merge.proportion`, which names what it raises; ``steps`` are its groups of steps. A
        rule that would have too few uploads without that one is left to withstand it.
        """

        def checked(server: State, uploads: Sequence[Upload], now: Round) -> State:
            try:
                proportion(uploads, server.tensors, self.config.max_ratio, steps)
            except BadUpload:
                # Dropped, a single one could bring every round to nothing.
                if self._serves(len(uploads) - 1):
                    raise
            return merge(server, uploads, now)

        return checked

    def _serves(self, uploads: int) -> bool:
        """Whether the rule can merge so many uploads."""
        try:
            robust.enough(self.config.rule, uploads, liars=self.config.liars, trim=self.config.trim)
        except TooFewUploads:
            return False
        return True

    def steps(self, values: Sequence[Tensors], weights: Sequence[float]) -> list[tuple[Tensors, float]]:
        """What the robust rule makes of steps that are to be added up, each times its weight.

        For what clients send beside their models, such as SCAFFOLD's variates. Under ``mean`` these are the
        steps and weights given. Otherwise those that the rule leaves, or the one that it makes of them, their
        weights having the sum of those given. ``norm_clip`` bounds them by their own median length.

        Args:
            values: one per client, all in one layout.
            weights: one per client.

        Raises:
            TooFewUploads: there are too few for the rule.
        """
        if not values:
            return []
        if self.config.rule in ("median", "trimmed_mean"):
            return [(self._center(values, weights), sum(weights))]
        zero = Tensors.zeros(values[0].layout, values[0].flat.dtype)
        chosen, values, _ = self._robust(zero, list(values), None)
        kept = [weights[k] for k in chosen]
        scale = 1.0 if len(kept) == len(weights) else sum(weights) / sum(kept)
        return [(value, weight * scale) for value, weight in zip(values, kept, strict=True)]

    def blend(self, models: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
        """Σ_k w_k φ_k, a LoRA module's product being what the LoRA rule makes of the models' products.

        Unlike :meth:`merge` it takes whole models, residuals included, that need not have one base in common.

        Args:
            models: at least one, all in one layout.
            weights: one per model, at least 0 and not all 0; made to sum to 1.
        """
        masses = shares(weights)
        mean = combine(models, masses)
        if self.config.lora == "flexlora":
            return mean.replace(lora.flexlora(models, masses)[0])
        if self.config.lora == "fedex":
            lost = lora.residuals(models, masses, mean, self.scaling)
            return mean.replace({name: mean[name].double() + more for name, more in lost})
        return mean

    def figures(self, state: State, group: str = "model") -> dict[str, float]:
        """What the last merge into ``group`` reports, see :data:`FIGURES`; empty before the first."""
        found = {name: state.values.get(_value(name, group)) for name in FIGURES}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}

    def _weights(self, replies: Sequence[Upload], now: Round) -> list[float]:
        """One weight per reply, as configured; their sum matters for ``mass`` alone."""
        if self.config.weights == "uniform":
            return [1.0] * len(replies)
        total = sum(now.weights.values()) if self.config.weights == "mass" else 1.0
        return [upload.weight / total for upload in replies]

    def _given(
        self, weigh: Weigh, current: Tensors, replies: Sequence[Upload], values: Sequence[Tensors]
    ) -> list[float]:
        """One weight per reply, from its update as the robust rule left it."""
        if self.config.weights == "mass":
            raise ValueError("weights 'mass' follows from the data's sizes; it takes no other weights")
        updates = {upload.client: value - current for upload, value in zip(replies, values, strict=True)}
        given = weigh(updates)
        return [given[upload.client] for upload in replies]

    def _robust(
        self, current: Tensors, values: list[Tensors], max_norm: float | None
    ) -> tuple[list[int], list[Tensors], dict[str, float]]:
        """Which uploads go into the mean, and they themselves, bounded or chosen by the rule."""
        kept, figures = list(range(len(values))), dict[str, float]()
        if self.config.rule == "norm_clip":
            before = values
            values, _ = robust.clip_norms(values, current, max_norm)
            short = sum(new is not old for new, old in zip(values, before, strict=True))
            figures["clipped"] = short / len(values)
        elif self.config.rule in ("krum", "multi_krum"):
            keep = 1 if self.config.rule == "krum" else None
            kept = robust.multi_krum(values, current, self.config.liars, keep)
            values = [values[k] for k in kept]
        return kept, values, {**figures, "merged": len(values)}

    def _center(self, values: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
        if self.config.rule == "median":
            return robust.coordinate_median(values, self.config.liars)
        if self.config.rule == "trimmed_mean":
            return robust.trimmed_mean(values, self.config.trim)
        return combine(values, weights)

    def _lora(
        self,
        whole: Tensors,
        merged: Tensors,
        values: Sequence[Tensors],
        weights: Sequence[float],
        figures: dict[str, float],
    ) -> dict[str, Tensor]:
        """What the LoRA rule puts in the place of the mean, by name; adds to ``figures``."""
        if lora.modules(merged.layout):
            figures["product_error"] = lora.product_error(values, weights)
        elif self.config.lora in ("ffa", "rolora"):
            # One factor is common to all clients, so nothing is lost by averaging the other.
            figures["product_error"] = 0.0
        if self.config.lora == "flexlora":
            factors, figures["truncation_error"] = lora.flexlora(values, weights)
            return factors
        if self.config.lora == "fedex":
            return {
                name: whole[name].double() + lost
                for name, lost in lora.residuals(values, weights, merged, self.scaling)
            }
        return {}


def _aligned(
    whole: Tensors, replies: Sequence[Upload], group: str, names: Iterable[str]
) -> tuple[Tensors, list[Tensors]]:
    """The server's tensors that are merged, and each reply's, all in one layout and dtype."""
    current = _learnt(whole.select(names))
    values = []
    for reply in replies:
        value = _learnt(reply.tensors[group])
        odd = sorted(set(value) ^ set(current))
        if odd:
            which = "lacks" if odd[0] in current else "holds"
            raise BadUpload(reply.client, f"group {group!r} {which} {odd[0]}")
        for entry in current.layout.entries:
            if value.layout[entry.name].shape != entry.shape:
                shape = value.layout[entry.name].shape
                raise BadUpload(reply.client, f"{entry.name} has shape {shape}, not {entry.shape}")
        if value.layout.names != current.layout.names:
            value = Tensors.gather(current.layout, value)
        values.append(Tensors(current.layout, value.flat.to(current.flat.dtype)))
    return current, values


def _learnt(tensors: Tensors) -> Tensors:
    """All but residuals, which the server alone changes."""
    return tensors.select(entry.name for entry in tensors.layout.entries if entry.part != lora.RESIDUAL)


def _slot(name: str, group: str) -> str:
    return name if group == "model" else f"{group}.{name}"


def _value(name: str, group: str) -> str:
    return f"merge.{_slot(name, group)}"
