"""Training of a selector with a latent taste z, and inference of z (FedVPA-GP, arXiv:2605.30873).

In each step z is inferred from a context: training pairs of the client outside the batch. Random draws are
named and made only where they are used, so disabling one term does not change the draws of others.

The selector reads h, the hidden state of a response under the frozen model: the mean over the response's
tokens, or the state at its end-of-text token, of the last block after the final norm or of an earlier one.
h is computed once per pair and stored with the run, as 2 · d floats. It is derived from texts and is as
private as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from prefed.core import Key, Objective, Phase, PhaseResult, Tensors
from prefed.data import Pair, Template
from prefed.data.response_encoder import ResponseEncoder
from prefed.models.config import PROTOTYPES
from prefed.models.tastes import CAP, VariationalSelector, Z
from prefed.train.feedback import CHOICES
from prefed.train.forward_passes import PairModel
from prefed.train.losses import CHOICE, LATENT, LossOutput, ObjectiveSpec
from prefed.train.losses.tastes import (
    CAPS,
    PRIORS,
    Gaussian,
    gumbel,
    mixture_kl,
    mixture_kl_bound,
    mixture_log_weights,
    orthogonality,
    prototype_pull,
    standard_kl,
)
from prefed.train.optimizer_steps import (
    PhaseSteps,
    backward,
    batches,
    dropout,
    grouped_outputs,
    make_optimizer,
)
from prefed.train.packed import PackedForward, Packing, trunk_hidden
from prefed.train.padded import logits_at, pad
from prefed.train.pair_cache import RecordCache, Rows, split_rows
from prefed.train.trainers import ObjectiveTrainer, PairTrainer, PhaseStart

BLOCK = 512
"""Pairs tokenised at a time."""


class ResponseFeatures:
    """h of both responses of every pair, in alphabetical order, so that it depends on no label.

    Args:
        model: pairs and model; :meth:`fill` loads the reference tensors into it.
        folder: where to store h; ``None`` keeps it in memory.
        name: identifies model and data in ``folder``.
    """

    def __init__(self, model: PairModel, encoder: ResponseEncoder, folder: Path | None, name: str) -> None:
        self._model, self._encoder, self._folder, self._name = model, encoder, folder, name
        self._settings = model.backbone.config.variational
        self._mean = self._settings.pool == "mean"

    @cached_property
    def _cache(self) -> RecordCache:
        width = self._model.backbone.width
        layer = "" if self._settings.layer is None else f"-{self._settings.layer}"
        sizes = np.full(len(self._model.tokens), 2 * width, np.int64)
        return RecordCache(sizes, self._folder, f"{self._name}-{self._settings.pool}{layer}")

    def fill(self, rows: Rows) -> None:
        """Compute missing ``rows``, which are all training pairs or all held-out pairs of a client.

        A response that several pairs have after the same prompt is read once per block. On a CPU two
        responses are a forward pass by themselves. On other devices the sorted rows determine the groups.
        Values are therefore bit-identical for any order of clients, and after a kill: each group is stored
        before the next one starts.
        """
        if not self._cache.missing(rows):
            return
        backbone = self._model.backbone
        backbone.load(backbone.reference)
        with torch.no_grad(), backbone.without_idle_lora():
            for block in split_rows(np.sort(rows), BLOCK):
                self._read(block)

    def _read(self, block: Rows) -> None:
        missing = np.array([self._cache.missing(row) for row in split_rows(block, 1)])
        pairs, places = distinct(self._encoder.encode([self._model.tokens.record(int(row)) for row in block]))
        groups = self._groups(pairs)
        group_of = np.repeat(np.arange(len(groups)), [2 * (each.stop - each.start) for each in groups])
        read_in = group_of[places]
        hidden = np.zeros((2 * len(pairs), self._model.backbone.width), np.float32)
        for number, group in enumerate(groups):
            if missing[(read_in == number).any(1)].any():
                found = self._hidden(pairs[group]).flatten(0, 1)
                hidden[2 * group.start : 2 * group.stop] = found.float().cpu().numpy()
                known = missing & (read_in.max(1) == number)
                self._cache.put(block[known], hidden[places[known]])

    def get(self, rows: Rows) -> torch.Tensor:
        """Return h of ``rows`` on the model's device, ``[n, 2, d]`` float32. The rows must be filled."""
        width = self._model.backbone.width
        hidden = torch.from_numpy(self._cache.get(rows).reshape(len(rows), 2, width))
        return hidden.to(self._model.backbone.device)

    def _groups(self, pairs: list[Pair]) -> list[slice]:
        """Return slices of ``pairs``, one per forward pass."""
        if self._model.backbone.device.type == "cpu":
            return [slice(k, k + 1) for k in range(len(pairs))]
        groups, start, total = [], 0, 0
        for end, pair in enumerate(pairs):
            tokens = sum(map(len, pair))
            if total + tokens > self._model.max_tokens and end > start:
                groups.append(slice(start, end))
                start, total = end, 0
            total += tokens
        return [*groups, slice(start, len(pairs))]

    def _hidden(self, pairs: list[Pair]) -> torch.Tensor:
        """Return h of ``pairs``, ``[n, 2, d]``."""
        packed = isinstance(self._model.forward, PackedForward) and self._settings.layer is None
        return (self._packed(pairs) if packed else self._padded(pairs)).view(len(pairs), 2, -1)

    def _packed(self, pairs: list[Pair]) -> torch.Tensor:
        backbone = self._model.backbone
        assert backbone.final is not None
        if self._mean:
            packing = Packing.of(pairs, whole=True, device=backbone.device)
            return packing.mean(backbone.final.norm(trunk_hidden(backbone, packing)), completion=True)
        # The last token of a branch is only a target, so repeat end-of-text to make it an input.
        more = [
            Pair(p.prompt, np.append(p.chosen, p.chosen[-1]), np.append(p.rejected, p.rejected[-1]))
            for p in pairs
        ]
        packing = Packing.of(more, ends=True, device=backbone.device)
        hidden: torch.Tensor = backbone.final.norm(trunk_hidden(backbone, packing))
        return hidden

    def _padded(self, pairs: list[Pair]) -> torch.Tensor:
        backbone = self._model.backbone
        ids, attention, completion = pad(pairs, device=backbone.device)
        none = torch.zeros_like(completion)
        _, outputs = logits_at(
            backbone.causal, none, input_ids=ids, attention_mask=attention, output_hidden_states=True
        )
        layer = self._settings.layer
        final: torch.Tensor = outputs.hidden_states[-1 if layer is None else layer]
        if layer is not None:
            final = torch.nn.functional.rms_norm(final.float(), final.shape[-1:], eps=1e-6)
        elif final.dim() > 3:  # Gemma 3n has four streams, joined after the last block
            final = backbone.trunk(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
        if self._mean:
            weights = completion[..., None].to(final.device, torch.float32)
            return (final.float() * weights).sum(1) / weights.sum(1)
        return final[torch.arange(len(ids), device=ids.device), attention.sum(1) - 1]


def distinct(pairs: Sequence[Pair]) -> tuple[list[Pair], npt.NDArray[np.int64]]:
    """Return pairs that together have each response to a prompt once, if the number of responses is even.

    If no response occurs twice, they are ``pairs`` themselves.

    Returns:
        The pairs, and ``[n, 2]`` the place of each response among them: 2 · pair, plus 1 for the second one.

    >>> one, two, three, four = (np.array([k], np.int32) for k in (1, 2, 3, 4))
    >>> few, places = distinct([Pair(one, two, three), Pair(one, two, four), Pair(one, three, four)])
    >>> [[ids.tolist() for ids in pair] for pair in few], places.tolist()
    ([[[1], [2], [3]], [[1], [4], [4]]], [[0, 1], [0, 2], [1, 2]])
    """
    found, places, single = list[Pair](), dict[tuple[bytes, bytes], int](), dict[bytes, int]()
    keys = [[(pair.prompt.tobytes(), ids.tobytes()) for ids in pair[1:]] for pair in pairs]
    for pair, own in zip(pairs, keys, strict=True):
        new = [(key, ids) for key, ids in zip(own, pair[1:], strict=True) if key not in places]
        if len(new) == 1 and (half := single.pop(own[0][0], None)) is not None:
            found[half] = found[half]._replace(rejected=new[0][1])
            places[new[0][0]] = 2 * half + 1
        elif new:
            places |= {key: 2 * len(found) + place for place, (key, _) in enumerate(new)}
            single |= {own[0][0]: len(found)} if len(new) == 1 else {}
            found.append(Pair(pair.prompt, new[0][1], new[-1][1]))
    return found, np.array([[places[key] for key in own] for own in keys])


PEERS = "peers"
"""Group of :attr:`Phase.constants` with the posteriors of all clients, in the order of their ids.

It contains ``peers/mean`` and ``peers/log_variance``, each ``[N, d_z]``, and ``peers/present`` ``[N]``: 1 if
a client has a posterior, else 0.
"""
TRUST = "trust/logits"
"""Tensor in :attr:`Phase.auxiliary`: ``[N]`` log π, one number per client."""


class LatentPrior:
    """The prior of z and its mixture weights, which train together with the model.

    Without peers it is N(0, I), and the weights do not change. The client itself is never its own peer.

    Args:
        settings: complete settings of the objective.
        phase: contains peers and weights; ``None`` for N(0, I).
    """

    def __init__(
        self, settings: Mapping[str, float], device: torch.device, phase: Phase | None = None
    ) -> None:
        self._settings, self._device = settings, device
        self._before = None if phase is None else phase.auxiliary
        self._optimizer: torch.optim.Optimizer | None = None
        peers = None if phase is None else phase.constants.get(PEERS)
        kind = PRIORS[int(settings["prior"])]
        if kind == "standard" or phase is None or phase.auxiliary is None or peers is None:
            return
        self._clip = phase.optimizer.clip
        present = peers["peers/present"] > 0
        if settings["own"] >= 0:
            present[int(settings["own"])] = False
        if not bool(present.any()):
            return
        self._present = present.to(device)
        self._peers = Gaussian(
            *(peers[f"peers/{name}"].float().to(device) for name in ("mean", "log_variance"))
        )
        self._logits = torch.nn.Parameter(phase.auxiliary[TRUST].float().to(device, copy=True))
        rate = phase.rates.get(TRUST, phase.optimizer.lr)
        self._optimizer = make_optimizer(phase.optimizer, [{"params": [self._logits], "lr": rate}])

    def kl(self, q: Gaussian, key: Key) -> torch.Tensor:
        """Return KL(q ‖ p) in nats: in closed form for N(0, I), as an estimate or a bound for a mixture.

        Random numbers are drawn at ``key.at("gumbel")`` and ``key.at("kl")``.
        """
        if self._optimizer is None:
            return standard_kl(q)
        settings = self._settings
        noise = gumbel(torch.rand(len(self._logits), generator=key.at("gumbel").torch())).to(self._device)
        weights = mixture_log_weights(self._logits, noise, settings["temperature"], self._present)
        if PRIORS[int(settings["prior"])] == "bound":
            return mixture_kl_bound(q, self._peers, weights)
        shape = (int(settings["samples"]), len(q.mean))
        return mixture_kl(
            q, self._peers, weights, torch.randn(shape, generator=key.at("kl").torch()).to(self._device)
        )

    def mean(self, width: int) -> torch.Tensor:
        """Return the mean of the prior, ``[d_z]``, without Gumbel noise."""
        if self._optimizer is None:
            return torch.zeros(width, device=self._device)
        none = torch.zeros_like(self._logits)
        weights = mixture_log_weights(self._logits, none, 1.0, self._present).exp().detach()
        return weights @ self._peers.mean

    def step(self, scale: float) -> None:
        """Update the weights along their gradient, clipped to the phase's bound, if they train.

        Args:
            scale: loss scale of the gradient; 0 skips the step.
        """
        if self._optimizer is None or self._logits.grad is None:
            return
        if scale:
            self._logits.grad.div_(scale)
            if self._clip:
                torch.nn.utils.clip_grad_norm_([self._logits], self._clip)
            self._optimizer.step()
        self._optimizer.zero_grad()

    def auxiliary(self) -> Tensors | None:
        """Return the current weights."""
        if self._optimizer is None or self._before is None:
            return self._before
        return Tensors.gather(self._before.layout, {TRUST: self._logits.to(self._before.flat.device)})


CONTEXT = 16
"""Maximum number of pairs in a context."""


class HiddenTrainer(ObjectiveTrainer):
    """Trains log-odds that are computed from hidden states.

    Raises:
        ValueError: the model lacks the tensor of the objective.
    """

    objective: ClassVar[ObjectiveSpec]

    def __init__(self, pair_trainer: PairTrainer) -> None:
        super().__init__(pair_trainer)
        model, spec = self._model.backbone, self.objective
        if spec.tensor not in model.layout:
            raise ValueError(f"objective {spec.name!r} requires a model with the tensor {spec.tensor!r}")
        encoder = pair_trainer.responses or ResponseEncoder(
            model.tokenizer, Template(model.tokenizer), model.window or sys.maxsize
        )
        self._features = ResponseFeatures(self._model, encoder, pair_trainer.features, "responses")
        self._weights: Mapping[str, torch.Tensor] = model.parameters

    def loss(self, tensors: Tensors, objective: Objective, rows: Rows) -> float:
        """Return the mean cross-entropy over ``rows``, for a latent taste at that in ``tensors``."""
        values, _ = self._choice(torch.from_numpy(self.outputs(tensors, rows)), rows)
        return float(values.mean())

    def _choice(self, orders: torch.Tensor, rows: Rows) -> LossOutput:
        return CHOICE(CHOICES.batch(self._model, rows, orders, None, CHOICE))


class LatentTrainer(HiddenTrainer):
    """Trains on the objective ``latent``, and computes log-odds at the taste in a model's tensors.

    A batch has at most half of the client's pairs, so that some remain for the context.
    """

    objective = LATENT

    def __init__(self, pair_trainer: PairTrainer) -> None:
        super().__init__(pair_trainer)
        backbone = self._model.backbone
        self._selector = VariationalSelector(backbone.config.variational, backbone.width)
        # With a LoRA the base log-odds change from step to step, but h is always the base model's.
        self._adapted = backbone.trains_trunk(backbone.layout.names)

    def train(self, start: PhaseStart) -> PhaseResult:
        """Run a phase.

        Returns:
            Metrics are means over the steps: log-likelihood loss ``nll``, ``kl``, ``pull``,
                ``orthogonality``, the posterior's mean ``log_variance``, ``accuracy`` and ``margin``.
        """
        phase, key, rows = start.phase, start.key, start.visit.rows
        settings, backbone = LATENT.resolve(phase.objective.settings), self._model.backbone
        size = min(phase.batch_size * phase.accumulate, max(1, len(rows) // 2))
        plan = list(batches(rows, replace(phase, batch_size=size, accumulate=1), key))
        self._fill(rows, rows[np.isin(rows, np.concatenate(plan))])
        backbone.load(start.tensors)
        steps, prior = PhaseSteps(backbone, phase), LatentPrior(settings, backbone.device, phase)
        with dropout(backbone, trunk=self._adapted):
            for batch in plan:
                backbone.grad.zero_()
                metrics = self._backward(rows, batch, settings, prior, key.at("step", steps.count))
                scale = backbone.loss_scale
                prior.step(scale if steps.take(batch, metrics) else 0.0)
        return replace(steps.result({}), auxiliary=prior.auxiliary())

    def _first_step(
        self, rows: Rows, tensors: Tensors, objective: Objective, batch: Rows, key: Key
    ) -> Callable[[], dict[str, float]]:
        settings, backbone = LATENT.resolve(objective.settings), self._model.backbone
        self._fill(rows, batch)
        backbone.load(tensors)

        def step() -> dict[str, float]:
            with dropout(backbone, trunk=self._adapted):
                return self._backward(rows, batch, settings, LatentPrior(settings, backbone.device), key)

        return step

    def outputs(self, tensors: Tensors, rows: Rows, z: torch.Tensor | None = None) -> npt.NDArray[np.float32]:
        """Return ``[n, 2]`` log-odds that the first response is better, by presentation order.

        Labels of ``rows`` are not used. Everything that does not depend on z is computed once per pair.

        Args:
            z: one taste ``[d_z]``, or one per pair ``[n, d_z]``; ``None`` uses the taste in ``tensors``.

        Raises:
            ValueError: z has another shape.
        """
        backbone, width = self._model.backbone, self._selector.settings.latent
        if z is not None and z.shape not in ((width,), (len(rows), width)):
            raise ValueError(
                f"z has shape {list(z.shape)}; expected [{width}] for one taste or [{len(rows)}, {width}] "
                "for one taste per pair"
            )
        self._features.fill(rows)
        self._references.fill_scoring(rows)
        backbone.load(tensors)
        base = torch.from_numpy(
            self._model.outputs(rows) if self._adapted else self._references.scoring.get(rows)
        )
        taste = self._weights[Z] if z is None else z.to(backbone.device, torch.float32)
        with torch.no_grad():
            orders = self._selector.log_odds(
                self._weights, self._features.get(rows), taste, base.to(backbone.device)
            )
        values: npt.NDArray[np.float32] = orders.cpu().numpy()
        return values

    def posteriors(
        self, tensors: Tensors, objective: Objective, rows: Rows, key: Key, pairs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return μ and log σ² after each of m contexts of at most :data:`CONTEXT` pairs; each ``[m, d_z]``.

        Args:
            rows: all training pairs of a client.
            pairs: use at most this many pairs; ``None``: all.
        """
        capped = LATENT.resolve(objective.settings)["capped"]
        order = key.numpy().permutation(np.sort(rows))[:pairs]
        if not len(order):
            none = torch.zeros(0, self._selector.settings.latent)
            return none, none.clone()
        self._features.fill(rows)
        self._model.backbone.load(tensors)
        contexts = np.array_split(order, -(-len(order) // CONTEXT))
        with torch.no_grad():
            found = [self._posterior(context, capped) for context in contexts]
        means, log_variances = zip(*found, strict=True)
        return torch.stack(means).cpu(), torch.stack(log_variances).cpu()

    def _fill(self, rows: Rows, judged: Rows) -> None:
        self._features.fill(rows)
        if not self._adapted:
            self._references.fill_training(judged, rows)

    def _posterior(self, context: Rows, capped: float, generator: torch.Generator | None = None) -> Gaussian:
        signs = torch.from_numpy(self._model.signs(context)).to(self._model.backbone.device)
        features = self._selector.pair_features(self._weights, self._features.get(context), signs, generator)
        kind = CAPS[int(capped)]
        cap, soft = None if kind == "off" else CAP, kind == "soft"
        return Gaussian(*self._selector.posterior(self._weights, features, cap=cap, soft=soft))

    def _backward(
        self, rows: Rows, batch: Rows, settings: Mapping[str, float], prior: LatentPrior, key: Key
    ) -> dict[str, float]:
        """Add the gradient of the loss of a step on ``batch`` to the gradient buffer."""
        device = self._model.backbone.device
        generator = key.at("dropout").torch(str(device))
        context = draw_context(rows, batch, key, self._model.tokens.pairs)
        z, terms, metrics = self._taste(context, settings, prior, key, generator)
        base, finish = self._base(batch, key)
        keep = None
        if share := settings["logit_dropout"]:
            keep = (torch.rand(len(batch), generator=key.at("keep").torch()) >= share).float().to(device)
        orders = self._selector.log_odds(self._weights, self._features.get(batch), z, base, keep, generator)
        values, more = self._choice(orders, batch)
        loss = values.mean() + terms
        backward(self._model.backbone, loss)
        finish()
        metrics |= {"loss": loss, "nll": values.mean(), **more}
        return {name: float(value.detach()) for name, value in metrics.items()}

    def _taste(
        self,
        context: Rows,
        settings: Mapping[str, float],
        prior: LatentPrior,
        key: Key,
        generator: torch.Generator,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return z of a step, the loss terms other than the likelihood, and their metrics."""
        device, width = self._model.backbone.device, self._selector.settings.latent
        terms, metrics = torch.zeros((), device=device), {}
        prototypes = self._weights.get(PROTOTYPES)
        if prototypes is not None:
            metrics["orthogonality"] = orthogonality(prototypes, self._selector.settings.scale)
            terms = terms + settings["orthogonality"] * metrics["orthogonality"]
        if not len(context):
            return prior.mean(width), terms, metrics
        q = self._posterior(context, settings["capped"], generator)
        z = q.sample(torch.randn(width, generator=key.at("z").torch()).to(device))
        metrics |= {"kl": prior.kl(q, key), "log_variance": q.log_variance.mean()}
        terms = terms + settings["beta"] * metrics["kl"]
        if prototypes is not None and settings["label"] >= 0:
            metrics["pull"] = prototype_pull(z, prototypes[int(settings["label"])])
            terms = terms + settings["pull"] * metrics["pull"]
        return z, terms, metrics

    def _base(self, batch: Rows, key: Key) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return ``[n, 2]`` log-odds of the model without z, and a function that backpropagates from them."""
        model = self._model
        if not self._adapted:
            base = torch.from_numpy(self._references.training.get(batch)).to(model.backbone.device)
            return base, lambda: None
        groups = model.groups(batch)

        def forward(number: int) -> torch.Tensor:
            key.at("dropout", number).seed_device(model.backbone.device.type)
            return model.run(groups[number])

        return grouped_outputs(forward, groups)


def draw_context(rows: Rows, batch: Rows, key: Key, pairs: npt.NDArray[np.uint64]) -> Rows:
    """Draw C ~ U{1 … 16} of ``rows`` whose pairs are not in ``batch``; fewer if fewer are left.

    Args:
        pairs: by row, equal if prompt and both responses are equal: a repeated pair would reveal its label.

    >>> rows, batch = np.arange(9), np.arange(7)
    >>> each = rows.astype(np.uint64)
    >>> sorted(draw_context(rows, batch, Key(4), each).tolist()), len(draw_context(rows, rows, Key(4), each))
    ([7, 8], 0)
    >>> draw_context(rows, batch, Key(4), np.array([0, 1, 2, 3, 4, 5, 6, 0, 8], np.uint64)).tolist()
    [8]
    """
    rest = np.unique(rows)
    rest = rest[~np.isin(pairs[rest], pairs[batch])]
    generator = key.at("context").numpy()
    count = min(int(generator.integers(1, CONTEXT + 1)), len(rest))
    return generator.choice(rest, count, replace=False)
