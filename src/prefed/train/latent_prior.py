"""The prior of a client's latent taste in a phase: N(0, I), or the mixture of the peers that it trusts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from prefed.core import Key, Phase, Tensors
from prefed.train.losses.latent import (
    PRIORS,
    Gaussian,
    gumbel,
    mixture_kl,
    mixture_kl_bound,
    mixture_log_weights,
    standard_kl,
)
from prefed.train.optim import make_optimizer

PEERS = "peers"
"""The group of :attr:`Phase.constants` with the clients' posteriors, in the order of their ids.

It holds ``peers/mean`` and ``peers/log_variance``, each ``[N, d_z]``, and ``peers/present`` ``[N]``: 1 where
a client has a posterior, else 0.
"""
TRUST = "trust/logits"
"""The tensor of :attr:`Phase.beside`: ``[N]`` log π, one number per client."""


class LatentPrior:
    """The prior and its weights, which train beside the model.

    Without a peer it is N(0, I), and the weights stay as they are. The client itself is no peer, whatever the
    server says.

    Args:
        settings: those of the objective, complete.
        phase: has the peers and the weights; ``None`` for N(0, I).
    """

    def __init__(
        self, settings: Mapping[str, float], device: torch.device, phase: Phase | None = None
    ) -> None:
        self._settings, self._device = settings, device
        self._before = None if phase is None else phase.beside
        self._optimizer: torch.optim.Optimizer | None = None
        peers = None if phase is None else phase.constants.get(PEERS)
        kind = PRIORS[int(settings["prior"])]
        if kind == "standard" or phase is None or phase.beside is None or peers is None:
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
        self._logits = torch.nn.Parameter(phase.beside[TRUST].float().to(device, copy=True))
        rate = phase.rates.get(TRUST, phase.optimizer.lr)
        self._optimizer = make_optimizer(phase.optimizer, [{"params": [self._logits], "lr": rate}])

    def kl(self, q: Gaussian, key: Key) -> torch.Tensor:
        """KL(q ‖ p) in nats: in closed form for N(0, I); an estimate or a bound for a mixture.

        Its random numbers are drawn at ``key.at("gumbel")`` and ``key.at("kl")``.
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
        """``[d_z]`` the mean of the prior, without Gumbel noise."""
        if self._optimizer is None:
            return torch.zeros(width, device=self._device)
        none = torch.zeros_like(self._logits)
        weights = mixture_log_weights(self._logits, none, 1.0, self._present).exp().detach()
        return weights @ self._peers.mean

    def step(self, scale: float) -> None:
        """Step the weights along their gradient, clipped by the phase's bound, if they have one.

        Args:
            scale: the loss scale that is in the gradient; 0 takes no step.
        """
        if self._optimizer is None or self._logits.grad is None:
            return
        if scale:
            self._logits.grad.div_(scale)
            if self._clip:
                torch.nn.utils.clip_grad_norm_([self._logits], self._clip)
            self._optimizer.step()
        self._optimizer.zero_grad()

    def beside(self) -> Tensors | None:
        """The weights as they are."""
        if self._optimizer is None or self._before is None:
            return self._before
        return Tensors.gather(self._before.layout, {TRUST: self._logits.to(self._before.flat.device)})
