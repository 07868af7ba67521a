"""The server step: merge uploads into the next shared tensors according to the ``[merge]`` table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefed.core import Entry, Key, Layout, Merged, Owner, Ownership, Plain, Round, State, Tensors, Upload
from prefed.merge import lora, rules
from prefed.merge.config import MergeConfig
from prefed.merge.means_distances import normalize, weighted_mean
from prefed.merge.oversized_updates import check_update_sizes
from prefed.merge.uploads import BadUpload, align, shorten, sort_uploads

if TYPE_CHECKING:
    from torch import Tensor


WeightFunction = Callable[[Mapping[str, Tensors]], Mapping[str, float]]
"""Maps client → update φ_i − φ, after the robust rule, to client → weight in the mean."""

FIGURES = ("merged", "update_norm", "product_error", "truncation_error", "clipped")
"""The metrics that a merge may report:

- ``merged``: number of merged uploads, without those dropped by the rule.
- ``update_norm``: Euclidean norm of the step of the shared tensors, without residuals.
- ``product_error``: error of averaging A and B separately, see :func:`prefed.merge.lora.product_error`.
- ``truncation_error``: relative error of ``flexlora``, see :func:`prefed.merge.lora.flexlora`.
- ``clipped``: share of uploads clipped by ``norm_clip``.
"""


@dataclass(frozen=True)
class Aggregator:
    """Merges uploads into the next model of the server.

    Attributes:
        scaling: s = α / rank of its LoRA, for products B A and their size in ``max_ratio``.

    >>> import torch
    >>> from prefed.core import Key
    >>> layout = Layout((Entry("lora/0/q/A", (1, 2), "lora", 0, "A"),))
    >>> aggregator = Aggregator(MergeConfig(weights="uniform"), layout, 2.0)
    >>> state = aggregator.init(Tensors.zeros(layout))
    >>> def reply(client, x, y):
    ...     return Upload(client, 1, {"model": Tensors(layout, torch.tensor([x, y]))}, sent_at=1)
    >>> now = Round(1, 10, Key(0), {"a": 1, "b": 1})
    >>> state, report = aggregator.merge(state, [reply("a", 1.0, 0.0), reply("b", 3.0, 0.0)], now)
    >>> state.tensors["model"].flat, report
    (tensor([2., 0.]), {'merged': 2, 'update_norm': 2.0})
    """

    config: MergeConfig
    layout: Layout
    scaling: float

    def ownership(self, owner: Callable[[Entry], Owner] = lambda entry: Owner.SHARED) -> Ownership:
        """Apply the LoRA rule to the tensors shared by ``owner``; see :func:`prefed.merge.lora.ownership`."""
        return lora.ownership(self.config.lora, self.layout, owner)

    def init(self, shared: Tensors, group: str = "model") -> State:
        """Return the initial server state: ``shared`` in ``group``, and the state of the server optimiser.

        Raises:
            ValueError: the rule is ``fedex`` or ``flora``, and a LoRA module has no residual.
        """
        if lora.needs(self.config.lora):
            residuals = [module.residual for module in lora.modules(shared.layout)]
            missing = [name for name in residuals if name not in shared.layout]
            if missing:
                raise ValueError(
                    f"lora {self.config.lora!r} needs a dense residual for each LoRA module; the model lacks "
                    f"{missing[0]} and {len(missing) - 1} more, so build it with the part {lora.RESIDUAL!r}"
                )
        if self.config.optimizer.name == "none":
            return State({group: shared})
        from prefed.merge import optimizers

        memory = optimizers.slots(self.config.optimizer, lora.without_residuals(shared))
        return State({group: shared, **{_key(name, group): value for name, value in memory.items()}})

    def merge(
        self,
        state: State,
        uploads: Sequence[Upload],
        now: Round,
        group: str = "model",
        weigh: WeightFunction | None = None,
        names: Iterable[str] | None = None,
    ) -> tuple[State, dict[str, float]]:
        """Return the next server state, and some of the metrics :data:`FIGURES`.

        Applies the robust rule, the weights with staleness discount, the LoRA rule and the server optimiser,
        in this order. Uploads without ``group`` are ignored. Tensors that are not merged keep their values,
        as do residuals unless the rule is ``fedex`` or ``flora``.

        Args:
            state: from :meth:`init` or the last merge.
            uploads: uploads in any order.
            group: the group of tensors to merge, in uploads and state.
            weigh: computes the weights of the mean from the updates, instead of the configured weights, e.g.
                :func:`prefed.merge.alignment_weights`.
            names: tensors of the group to merge, by default all. Uploads must contain exactly these, apart
                from residuals.

        Raises:
            BadUpload: an upload contains other tensors or shapes.
            TooFewUploads: the rule needs more uploads.
            ValueError: the weights are negative or all 0, or sum to more than 1 under ``mass``.
        """
        replies = [upload for upload in sort_uploads(uploads) if group in upload.tensors]
        whole = state.tensors[group]
        current = lora.without_residuals(whole.select(whole if names is None else names))
        values = align(replies, group, current)
        if not values or not current.layout.entries:
            return state, {}
        if all(upload.client in self.config.ranks for upload in replies):
            most = max(self.config.ranks[upload.client] for upload in replies)
            values = [lora.with_rows_above(value, most, current) for value in values]
        indices, values, figures = rules.select(self.config, current, values, self.config.max_norm)
        replies = [replies[k] for k in indices]
        mixture: dict[str, Plain] = {}
        if weigh is None and self.config.weights == "afl":
            key = _key(rules.MIXTURE, group)
            weights, mixture[key] = rules.afl(state.values.get(key), replies, now, self.config.afl_lr)
        elif weigh is None:
            weights = rules.weights(self.config, replies, now)
        elif not self.config.plain_weights:
            raise ValueError(
                f"[merge] weights = {self.config.weights!r} cannot be combined with weights of the method"
            )
        else:
            updates = {u.client: value - current for u, value in zip(replies, values, strict=True)}
            by_client = weigh(updates)
            weights = [by_client[upload.client] for upload in replies]
        discounts = [
            self.config.staleness.discount(max(0, now.number - upload.sent_at)) for upload in replies
        ]
        if self.config.late == "delta":
            # Normalised weights would cancel a discount common to all replies, so shorten the steps.
            values = [shorten(current, value, d) for value, d in zip(values, discounts, strict=True)]
        else:
            weights = [weight * d for weight, d in zip(weights, discounts, strict=True)]
        if self.config.weights == "mass":
            values, weights = [current, *values], [rules.absent_mass(weights), *weights]
        else:
            weights = normalize(weights)
        merged = rules.center(self.config, values, weights)
        changes = self._lora(whole, merged, values, weights, now.key, figures)
        merged = merged.replace({name: value for name, value in changes.items() if name in merged})
        moved, memory = self._step(state, group, current, merged)
        figures["update_norm"] = (moved - current).norm()
        new = whole.replace(moved).replace({name: v for name, v in changes.items() if name not in moved})
        report = {name: figures[name] for name in FIGURES if name in figures}
        return state.update({group: new, **memory}, mixture), report

    def with_size_check(
        self,
        merge: Callable[[State, Sequence[Upload], Round], Merged],
        steps: Collection[str] = (),
    ) -> Callable[[State, Sequence[Upload], Round], Merged]:
        """Return ``merge``, preceded by :func:`prefed.merge.check_update_sizes` with ``max_ratio``.

        An oversized upload is accepted if the rule could not merge one upload fewer.

        Args:
            merge: merges the uploads of a round.
            steps: groups in which clients send the update itself.
        """

        def checked(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
            try:
                most, scaling = self.config.max_ratio, self.scaling
                check_update_sizes(uploads, server.tensors, most, steps, scaling)
            except BadUpload:
                # Otherwise, one client could stop every round with a refused upload.
                if rules.can_merge(self.config, len(uploads) - 1):
                    raise
            return merge(server, uploads, now)

        return checked

    def robust_steps(
        self, values: Sequence[Tensors], weights: Sequence[float]
    ) -> list[tuple[Tensors, float]]:
        """Apply the robust rule to steps that a method sums with weights, such as SCAFFOLD's variates.

        ``mean`` changes nothing. ``median`` and ``trimmed_mean`` return one step. ``krum`` and ``multi_krum``
        select steps. ``norm_clip`` clips steps to the median norm. The sum of the weights is preserved.

        Args:
            values: one step per client, all with the same layout.
            weights: one weight per client.

        Raises:
            TooFewUploads: the rule needs more steps.
        """
        if not values:
            return []
        if self.config.kind.replaces_mean:
            return [(rules.center(self.config, values, normalize(weights)), sum(weights))]
        zero = Tensors.zeros(values[0].layout, values[0].flat.dtype)
        indices, chosen, _ = rules.select(self.config, zero, values, None)
        rest = [weights[k] for k in indices]
        scale = 1.0 if len(rest) == len(weights) else sum(weights) / sum(rest)
        return [(value, weight * scale) for value, weight in zip(chosen, rest, strict=True)]

    def blend(self, models: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
        """Return Σ_k w_k φ_k, with LoRA products according to the LoRA rule.

        Unlike :meth:`merge`, it takes whole models, including residuals, with any starting points.

        Args:
            models: at least one model, all with the same layout.
            weights: one weight per model, at least 0 and not all 0; they are normalised.
        """
        masses = normalize(weights)
        mean = weighted_mean(models, masses)
        if self.config.lora == "flexlora":
            return mean.replace(lora.flexlora(models, masses)[0])
        if self.config.lora == "flora":
            more = lora.stacked(models, masses, self.scaling)
            zero = {module.b: mean[module.b] * 0.0 for module in lora.modules(mean.layout)}
            return mean.replace({**zero, **{name: mean[name].double() + value for name, value in more}})
        if self.config.lora == "fedex":
            lost = lora.residuals(models, masses, mean, self.scaling)
            return mean.replace({name: mean[name].double() + more for name, more in lost})
        return mean

    def _step(
        self, state: State, group: str, current: Tensors, merged: Tensors
    ) -> tuple[Tensors, dict[str, Tensors]]:
        """Take a step of the server optimiser; return the model and the next tensors of its state, by key."""
        if self.config.optimizer.name == "none":
            return merged, {}
        from prefed.merge import optimizers

        names = optimizers.slots(self.config.optimizer, current)
        memory = {name: state.tensors[_key(name, group)] for name in names}
        before = {name: value.select(current) for name, value in memory.items()}
        moved, after = optimizers.step(self.config.optimizer, current, merged, before)
        return moved, {_key(name, group): memory[name].replace(value) for name, value in after.items()}

    def _lora(
        self,
        whole: Tensors,
        merged: Tensors,
        values: Sequence[Tensors],
        weights: Sequence[float],
        key: Key,
        figures: dict[str, float],
    ) -> dict[str, Tensor]:
        """Return the tensors that the LoRA rule does not set to the mean. Adds to ``figures``."""
        if lora.modules(merged.layout):
            figures["product_error"] = lora.product_error(values, weights)
        elif self.config.lora in ("ffa", "rolora"):
            # All clients have the same value of one factor, so the mean of the other is exact.
            figures["product_error"] = 0.0
        if self.config.lora == "flexlora":
            factors, figures["truncation_error"] = lora.flexlora(values, weights)
            return factors
        if self.config.lora == "flora":
            products = lora.stacked(values, weights, self.scaling)
            new = {name: whole[name].double() + product for name, product in products}
            return {**new, **lora.restarted(merged.layout, key)}
        if self.config.lora == "fedex":
            return {
                name: whole[name].double() + lost
                for name, lost in lora.residuals(values, weights, merged, self.scaling)
            }
        return {}


def _key(name: str, group: str) -> str:
    return name if group == "model" else f"{group}.{name}"
