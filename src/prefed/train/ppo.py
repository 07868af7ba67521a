"""Training with offline PPO on preference pairs (see :mod:`prefed.train.losses.ppo`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F

from prefed.core import Key, Objective, PhaseResult, Tensors
from prefed.data import Pair
from prefed.models import Backbone, ModelError
from prefed.train.forward_passes import Features
from prefed.train.logprobs import token_terms
from prefed.train.losses import PPO
from prefed.train.losses.ppo import KL_TOLERANCE, Rollout, pair_rewards, ppo, rollout, standardize
from prefed.train.optimizer_steps import PhaseSteps, backward
from prefed.train.packed import Packing, trunk_hidden
from prefed.train.padded import PaddedForward, PairForward, by_response, logits_at, pad, shifted
from prefed.train.pair_cache import RecordCache, Rows
from prefed.train.trainers import ObjectiveTrainer, PairTrainer, PhaseStart, Visit


@dataclass(frozen=True)
class TokenOutputs:
    """Outputs for the M completion tokens of a batch, pair by pair, chosen response first.

    Attributes:
        logprobs: ``[M]`` log π of each token, in nats.
        values: ``[M]`` critic's value of the state before each token.
        entropies: ``[M]`` entropy of the policy in that state, in nats.
    """

    logprobs: torch.Tensor
    values: torch.Tensor
    entropies: torch.Tensor


@dataclass(frozen=True)
class _PairRollouts:
    """Rollout at the start of a visit, by pair.

    Attributes:
        tokens: all completion tokens of the rows.
        index: row → its tokens.
    """

    tokens: Rollout
    index: Mapping[int, torch.Tensor]

    def of(self, rows: Rows) -> Rollout:
        """Return the tokens of ``rows``, in order."""
        return self.tokens.take(torch.cat([self.index[int(row)] for row in rows]))


class PPOTrainer(ObjectiveTrainer):
    """Trains on the objective ``ppo``.

    Epochs and batches of a phase are those of PPO: ``batch_size`` 2 gives minibatches of four sequences.
    Dropout is off, because otherwise the ratio π/π_old would measure the dropout masks.
    """

    def __init__(self, pair_trainer: PairTrainer) -> None:
        super().__init__(pair_trainer)
        self._rewards, self._folder = pair_trainer.rewards, pair_trainer.cache
        self._name = f"{pair_trainer.name}-tokens"
        # The phases of a visit share one rollout, computed by the first phase.
        self._rollouts: WeakKeyDictionary[Visit, _PairRollouts] = WeakKeyDictionary()

    @cached_property
    def _reference(self) -> RecordCache:
        tokens = self._model.tokens.lengths[:, 1:].sum(1, dtype=np.int64)
        return RecordCache(tokens, self._folder, self._name)

    def train(self, start: PhaseStart) -> PhaseResult:
        """Run a phase.

        π_old is the policy at the start of the visit, in later phases too. A phase stops before a batch whose
        mean of ρ − 1 − log ρ exceeds 1.5 times ``target_kl``.

        Returns:
            Metrics are means over the steps, except ``stopped``: 1 if the phase stopped early.

        Raises:
            ModelError: there is no reward model, or the model has no critic.
        """
        visit, phase = start.visit, start.phase
        settings = PPO.resolve(phase.objective.settings)
        backbone, rows = self._model.backbone, visit.rows
        scores = self._scores(rows)
        self._load(start.tensors, rows, rows, settings)
        # The first phase of a visit needs the features of all rows, later phases only those of their batches.
        known = self._rollouts.get(visit)
        used = rows if known is None else rows[np.isin(rows, np.concatenate(start.plan))]
        features = None if backbone.trains_trunk(phase.train) else self._model.features(used)
        if known is None:
            known = self._rollouts[visit] = self._roll_out(rows, scores, settings, features)
        steps = PhaseSteps(backbone, phase)
        stopped = False
        for batch in start.plan:
            backbone.grad.zero_()
            metrics = self._backward(batch, known, settings, features)
            bound = KL_TOLERANCE * settings["target_kl"]
            # NaN stops the phase too.
            if bound and not metrics["kl"] <= bound:
                stopped = True
                if not steps.count:
                    steps.add_metrics(metrics)
                break
            steps.take(batch, metrics)
        return steps.result({}, stopped=float(stopped))

    def _first_step(
        self, rows: Rows, tensors: Tensors, objective: Objective, batch: Rows, key: Key
    ) -> Callable[[], dict[str, float]]:
        """Rewards are standardised over all ``rows``. ``key`` is unused, since there is no dropout."""
        settings = PPO.resolve(objective.settings)
        self._load(tensors, batch, rows, settings)
        taken = np.isin(rows, batch)
        scores = self._scores(rows)[torch.from_numpy(taken)]
        start = self._roll_out(rows[taken], scores, settings, None)
        return partial(self._backward, batch, start, settings, None)

    def loss(self, tensors: Tensors, objective: Objective, rows: Rows) -> float:
        """Return the loss of a first step on all ``rows``."""
        return self._first_step(rows, tensors, objective, rows, Key(0))()["loss"]

    def _scores(self, rows: Rows) -> torch.Tensor:
        """Return ``[n, 2]`` rewards R of the responses."""
        if self._rewards is None:
            raise ModelError("objective 'ppo' requires a reward model: set [method] reward_model")
        if "value/weight" not in self._model.backbone.layout:
            raise ModelError("objective 'ppo' requires a critic: load the model with the part 'value'")
        return pair_rewards(standardize(torch.from_numpy(self._rewards.get(rows))))

    def _load(self, tensors: Tensors, rows: Rows, client_rows: Rows, settings: Mapping[str, float]) -> None:
        """Compute log π_ref of ``rows``, then load ``tensors`` without gradients."""
        if settings["kl"]:
            self.fill_reference(rows, client_rows)
        self._model.backbone.load(tensors)
        self._model.backbone.train_only(())

    def _roll_out(
        self, rows: Rows, rewards: torch.Tensor, settings: Mapping[str, float], features: Features | None
    ) -> _PairRollouts:
        """Return the rollout of ``rows`` with rewards ``[n, 2]``. The model must hold π_old."""
        outputs = self._all_outputs(rows, features)
        reference = outputs.logprobs
        if settings["kl"]:
            reference = torch.from_numpy(self._reference.get(rows))
        lengths = torch.from_numpy(self._model.tokens.lengths[rows, 1:].reshape(-1).astype(np.int64))
        tokens = rollout(
            outputs.logprobs,
            outputs.values,
            reference,
            rewards.reshape(-1),
            lengths,
            **{name: settings[name] for name in ("kl", "discount", "trace", "scaled")},
        )
        index = torch.split(torch.arange(len(outputs.logprobs)), lengths.view(-1, 2).sum(1).tolist())
        return _PairRollouts(tokens, dict(zip(rows.tolist(), index, strict=True)))

    def fill_reference(self, rows: Rows, client_rows: Rows) -> None:
        """Compute log π_ref of every token of ``rows``, with as few other pairs as possible.

        Groups depend only on ``client_rows``, all pairs of the client. The policy at the start of a visit
        uses the same groups, so its log-probabilities are bit-identical if it equals the reference. Each
        group is stored before the next one starts.
        """
        if not self._reference.missing(rows):
            return
        backbone = self._model.backbone
        backbone.load(backbone.reference)
        backbone.train_only(())
        for group in self._model.groups(client_rows):
            if np.isin(group, rows).any() and self._reference.missing(group):
                with torch.no_grad():
                    self._reference.put(group, self._outputs(group, None).logprobs.cpu().numpy())

    def _all_outputs(self, rows: Rows, features: Features | None) -> TokenOutputs:
        """Return the outputs of all completion tokens of ``rows``, without gradients, on the CPU."""
        with torch.no_grad():
            parts = [self._outputs(group, features) for group in self._model.groups(rows)]
        columns = (
            [getattr(part, name).cpu() for part in parts] for name in ("logprobs", "values", "entropies")
        )
        return TokenOutputs(*(torch.cat(column) for column in columns))

    def _outputs(self, rows: Rows, features: Features | None) -> TokenOutputs:
        model = self._model
        trunk = None if features is None else [features[int(row)] for row in rows]
        pairs, tastes = model.pairs(rows), model.tastes(rows)
        return token_outputs(model.backbone, model.forward, pairs, trunk, tastes)

    def _backward(
        self, rows: Rows, start: _PairRollouts, settings: Mapping[str, float], features: Features | None
    ) -> dict[str, float]:
        """Add the gradient of the loss over ``rows`` to the gradient buffer."""
        model = self._model
        coefficients = {name: settings[name] for name in ("clip", "value", "entropy")}
        total = int(model.tokens.lengths[rows, 1:].sum())
        sums: defaultdict[str, float] = defaultdict(float)
        for group in model.groups(rows):
            outputs = self._outputs(group, features)
            old = start.of(group).to(outputs.logprobs.device)
            losses, metrics = ppo(old, outputs.logprobs, outputs.values, outputs.entropies, **coefficients)
            loss = losses.sum() / (len(rows) if settings["sums"] else total)
            if loss.requires_grad:
                backward(model.backbone, loss)
            sums["loss"] += float(loss.detach())
            for name, value in metrics.items():
                sums[name] += float(value) * len(losses) / total
        return dict(sums)


def token_outputs(
    backbone: Backbone,
    forward: PairForward,
    pairs: Sequence[Pair],
    features: Sequence[torch.Tensor] | None = None,
    tastes: torch.Tensor | None = None,
) -> TokenOutputs:
    """Return the outputs for the completion tokens of ``pairs`` under the tensors in the model.

    Args:
        backbone: a model with the part ``"value"``.
        features: trunk output of each pair (:meth:`prefed.train.packed.PackedForward.features`); ``None``
            runs the trunk.
        tastes: ``[B, d_z]``, the taste of each pair; ``None`` for a model without a taste map.
    """
    if isinstance(forward, PaddedForward):
        return _plain(backbone, pairs, tastes)
    packing = Packing.of(pairs, device=backbone.device)
    hidden = trunk_hidden(backbone, packing, tastes) if features is None else torch.cat(list(features))
    assert backbone.final is not None
    final = backbone.final.norm(hidden)[packing.pick]
    weight = backbone.causal.get_output_embeddings().weight
    logprobs, entropies = token_terms(backbone.for_head(final), weight, packing.targets)
    return TokenOutputs(logprobs, _values(backbone, final), entropies)


def _plain(backbone: Backbone, pairs: Sequence[Pair], tastes: torch.Tensor | None) -> TokenOutputs:
    ids, attention, completion = pad(pairs, device=backbone.device)
    at = shifted(completion)
    with backbone.tasting(by_response(tastes)):
        logits, out = logits_at(
            backbone.causal, at, input_ids=ids, attention_mask=attention, output_hidden_states=True
        )
    every = logits.float().log_softmax(1)
    logprobs, entropies = every.gather(1, ids[completion][:, None])[:, 0], -(every.exp() * every).sum(1)
    return TokenOutputs(logprobs, _values(backbone, out.hidden_states[-1][at]), entropies)


def _values(backbone: Backbone, final: torch.Tensor) -> torch.Tensor:
    weight, bias = backbone.parameters["value/weight"], backbone.parameters["value/bias"]
    return F.linear(final.float(), weight, bias)[:, 0]
