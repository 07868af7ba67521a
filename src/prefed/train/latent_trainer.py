"""Phases of a selector with a latent taste z, and what it infers of a client (FedVPA-GP, arXiv:2605.30873).

z of a step comes from a context: training pairs of the client that the step does not judge. Its draws are
named, and each is made only where it is used: so a term that is switched off changes no other draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from prefed.core import Key, Objective, Phase, PhaseResult, Tensors
from prefed.models.variational import CAP, PROTOTYPES, VariationalSelector
from prefed.models.variational import LATENT as TASTE
from prefed.train.latent_prior import LatentPrior
from prefed.train.losses import CHOICE, LATENT, ChoiceBatch
from prefed.train.losses.latent import CAPS, Gaussian, orthogonality, prototype_pull
from prefed.train.pair_cache import Rows
from prefed.train.pair_model import PairModel
from prefed.train.ppo import RolloutCache
from prefed.train.references import ReferenceLogprobs
from prefed.train.response_features import ResponseFeatures
from prefed.train.steps import PhaseSteps, backward, batches, dropout, read_gradient

CONTEXT = 16
"""The most pairs of a context."""
Z = f"{TASTE}/z"
"""The tensor that holds the taste with which a model judges."""


class LatentTrainer:
    """Trains on the objective ``latent``, and gives log-odds at the taste that a model's tensors hold.

    A batch has at most half of the client's pairs, so that a context is left.
    """

    def __init__(self, model: PairModel, references: ReferenceLogprobs, features: ResponseFeatures) -> None:
        self._model, self._references, self._features = model, references, features
        backbone = model.backbone
        settings = backbone.config.variational
        self._selector = VariationalSelector(settings, backbone.width)
        self._weights: Mapping[str, torch.Tensor] = backbone.parameters
        # With a LoRA the base log-odds change from step to step. h is the untouched model's all the same.
        self._adapted = backbone.trains_trunk(backbone.layout.names)

    def train(
        self, tensors: Tensors, phase: Phase, rows: Rows, key: Key, rollout_cache: RolloutCache
    ) -> PhaseResult:
        """Run ``phase`` from ``tensors``; see :meth:`prefed.train.PairTrainer.train`.

        Returns:
            Its figures are means over the steps: of the log-likelihood loss ``nll``, ``kl``, ``pull``,
            ``orthogonality``, the posterior's mean ``log_variance``, ``accuracy`` and ``margin``.
        """
        settings = LATENT.resolve(phase.objective.settings)
        backbone, key = self._model.backbone, key.at("phase", phase.name)
        size = min(phase.batch_size * phase.accumulate, max(1, len(rows) // 2))
        plan = list(batches(rows, replace(phase, batch_size=size, accumulate=1), key))
        self._fill(rows, rows[np.isin(rows, np.concatenate(plan))])
        backbone.load(tensors)
        steps, prior = PhaseSteps(backbone, phase), LatentPrior(settings, backbone.device, phase)
        with dropout(backbone, trunk=self._adapted):
            for batch in plan:
                backbone.grad.zero_()
                figures = self._backward(rows, batch, settings, prior, key.at("step", steps.count))
                scale = backbone.loss_scale
                prior.step(scale if steps.take(batch, figures) else 0.0)
        return replace(steps.result({}), beside=prior.beside())

    def gradient(
        self, tensors: Tensors, objective: Objective, rows: Rows, batch: Rows, names: Iterable[str], key: Key
    ) -> tuple[Tensors, float]:
        """Gradient in the tensors ``names``, and value, of the loss of a step on ``batch``, some of ``rows``.

        The prior is N(0, I). Without other ``rows`` than the batch there is no context.
        """
        settings, backbone = LATENT.resolve(objective.settings), self._model.backbone
        self._fill(rows, batch)
        backbone.load(tensors)
        backbone.train_only(names)
        backbone.grad.zero_()
        with dropout(backbone, trunk=self._adapted):
            prior = LatentPrior(settings, backbone.device)
            figures = self._backward(rows, batch, settings, prior, key)
        return read_gradient(backbone), figures["loss"]

    def loss(self, tensors: Tensors, objective: Objective, rows: Rows) -> float:
        """Mean log-likelihood loss over ``rows`` at the taste in ``tensors``, without dropout."""
        orders = torch.from_numpy(self.orders(tensors, rows))
        values, _ = CHOICE(ChoiceBatch(orders, torch.from_numpy(self._model.signs(rows))))
        return float(values.mean())

    def orders(self, tensors: Tensors, rows: Rows, z: torch.Tensor | None = None) -> npt.NDArray[np.float32]:
        """``[n, 2]`` log-odds that the first response is better, in both presentation orders.

        No label of ``rows`` is read. What does not depend on z is computed once for each pair.

        Args:
            z: the taste of all pairs ``[d_z]``, or of each ``[n, d_z]``; ``None`` for that in ``tensors``.

        Raises:
            ValueError: z has another shape.
        """
        backbone, width = self._model.backbone, self._selector.settings.latent
        if z is not None and z.shape not in ((width,), (len(rows), width)):
            raise ValueError(
                f"z has the shape {list(z.shape)}; it takes [{width}] for one taste, "
                f"or [{len(rows)}, {width}] for a taste per pair"
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
        """μ and log σ² after each of m even contexts of at most :data:`CONTEXT` pairs; each ``[m, d_z]``.

        Args:
            rows: all training pairs of a client.
            key: the randomness of the contexts.
            pairs: so many of the shuffled pairs, or all if there are fewer; ``None``: all.
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
        signs = self._signs(context)
        features = self._selector.pair_features(self._weights, self._features.get(context), signs, generator)
        kind = CAPS[int(capped)]
        cap, soft = None if kind == "off" else CAP, kind == "soft"
        return Gaussian(*self._selector.posterior(self._weights, features, cap=cap, soft=soft))

    def _signs(self, rows: Rows) -> torch.Tensor:
        return torch.from_numpy(self._model.signs(rows)).to(self._model.backbone.device)

    def _backward(
        self, rows: Rows, batch: Rows, settings: Mapping[str, float], prior: LatentPrior, key: Key
    ) -> dict[str, float]:
        """Add the gradient of a step's loss on ``batch`` to the gradient buffer."""
        device = self._model.backbone.device
        generator = key.at("dropout").torch(str(device))
        context = draw_context(rows, batch, key, self._model.tokens.pairs)
        z, terms, figures = self._taste(context, settings, prior, key, generator)
        base, finish = self._base(batch, key)
        keep = None
        if share := settings["logit_dropout"]:
            keep = (torch.rand(len(batch), generator=key.at("keep").torch()) >= share).float().to(device)
        orders = self._selector.log_odds(self._weights, self._features.get(batch), z, base, keep, generator)
        values, more = CHOICE(ChoiceBatch(orders, self._signs(batch)))
        loss = values.mean() + terms
        backward(self._model.backbone, loss)
        finish()
        figures |= {"loss": loss, "nll": values.mean(), **more}
        return {name: float(value.detach()) for name, value in figures.items()}

    def _taste(
        self,
        context: Rows,
        settings: Mapping[str, float],
        prior: LatentPrior,
        key: Key,
        generator: torch.Generator,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Z of a step, the terms of the loss beside the likelihood, and their figures."""
        device, width = self._model.backbone.device, self._selector.settings.latent
        terms, figures = torch.zeros((), device=device), {}
        prototypes = self._weights.get(PROTOTYPES)
        if prototypes is not None:
            figures["orthogonality"] = orthogonality(prototypes, self._selector.settings.scale)
            terms = terms + settings["orthogonality"] * figures["orthogonality"]
        if not len(context):
            return prior.mean(width), terms, figures
        q = self._posterior(context, settings["capped"], generator)
        z = q.sample(torch.randn(width, generator=key.at("z").torch()).to(device))
        figures |= {"kl": prior.kl(q, key), "log_variance": q.log_variance.mean()}
        terms = terms + settings["beta"] * figures["kl"]
        if prototypes is not None and settings["label"] >= 0:
            figures["pull"] = prototype_pull(z, prototypes[int(settings["label"])])
            terms = terms + settings["pull"] * figures["pull"]
        return z, terms, figures

    def _base(self, batch: Rows, key: Key) -> tuple[torch.Tensor, Callable[[], None]]:
        """``[n, 2]`` log-odds of the model without z, and what carries their gradient on into a LoRA."""
        model = self._model
        if not self._adapted:
            base = torch.from_numpy(self._references.training.get(batch)).to(model.backbone.device)
            return base, lambda: None
        groups = model.groups(batch)

        def forward(number: int) -> torch.Tensor:
            torch.manual_seed(key.at("dropout", number).number())
            return model.run(groups[number])

        # First the slope of the loss at every output, then one pass for each group that fits into memory.
        with torch.no_grad():
            whole = torch.cat([forward(number) for number in range(len(groups))])
        whole.requires_grad_()

        def finish() -> None:
            assert whole.grad is not None
            slopes = torch.split(whole.grad, [len(group) for group in groups])
            for number, slope in enumerate(slopes):
                outputs = forward(number)
                if outputs.requires_grad:
                    outputs.backward(slope)  # type: ignore[no-untyped-call]

        return whole, finish


def draw_context(rows: Rows, batch: Rows, key: Key, pairs: npt.NDArray[np.uint64]) -> Rows:
    """C ~ U{1 … 16} of ``rows`` whose pairs are not in ``batch``; fewer where fewer are left.

    Args:
        pairs: by row, equal where prompt and both responses are equal. A repeat of a pair of the batch tells
            its label as the pair itself does.

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
