"""Offline PPO on preference pairs, as pure functions (FedPDPO, arXiv:2603.19741, D.3.1).

The clipped losses are those of PPO (arXiv:1707.06347). The responses of the data are treated as if they had
been drawn from π_old, the policy as a visit finds it. They were not, and no importance weight corrects for
it: this is the variant that FedPDPO compares with, and not PPO as it is run on a policy's own samples.

A response's completion tokens lie end to end: ``[M]`` values over S responses, whose ``lengths`` say where
one ends and the next begins. Pairs lie in order, the chosen response before the rejected one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefed.core.lazy import torch
from prefed.losses.batch import Losses

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Rollout",
    "drift",
    "gae",
    "pair_rewards",
    "policy_loss",
    "ppo",
    "rollout",
    "standardize",
    "token_rewards",
    "value_loss",
]

LIMIT = 5.0
PATIENCE = 1.5
"""A visit stops where the mean :func:`drift` of a batch is above this many times ``target_kl``."""


def standardize(scores: Tensor) -> Tensor:
    """A reward model's scores less their mean, over their standard deviation, clipped to ±5.

    Args:
        scores: ``[n, 2]`` scores of a client's training pairs; where all are the same the result is 0.

    >>> standardize(torch.tensor([[1.0, 3.0], [3.0, 1.0]]))
    tensor([[-1.,  1.],
            [ 1., -1.]])
    """
    wide = scores.double()
    centred = wide - wide.mean()
    spread = centred.square().mean().sqrt()
    if spread <= 1e-12 * wide.abs().max():
        return torch.zeros_like(scores)
    return (centred / spread).clamp(-LIMIT, LIMIT).to(scores.dtype)


def pair_rewards(scores: Tensor) -> Tensor:
    """R(y_w) = d/2 and R(y_l) = −d/2 with d = r(x, y_w) − r(x, y_l).

    Args:
        scores: ``[n, 2]`` standardised scores r.

    Returns:
        ``[n, 2]``. A pair that the reward model orders against its label has d < 0.

    >>> pair_rewards(torch.tensor([[2.0, -1.0]]))
    tensor([[ 1.5000, -1.5000]])
    """
    half = (scores[:, :1] - scores[:, 1:]) / 2
    return torch.cat([half, -half], 1)


def token_rewards(
    logprobs: Tensor, reference: Tensor, rewards: Tensor, lengths: Tensor, *, kl: float
) -> Tensor:
    """−kl (log π_old − log π_ref) at every token, and the response's reward at its last.

    Args:
        logprobs: ``[M]`` log π_old.
        reference: ``[M]`` log π_ref.
        rewards: ``[S]`` R.
        lengths: ``[S]`` tokens of each response, at least 1.
        kl: weight of the penalty.

    Returns:
        ``[M]``.
    """
    result = -kl * (logprobs - reference)
    result[lengths.cumsum(0) - 1] += rewards
    return result


def gae(
    rewards: Tensor, values: Tensor, lengths: Tensor, *, discount: float, trace: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (arXiv:1506.02438, eq. 16) of every response by itself.

    A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} − V_t; after a response's last token V is 0.

    Args:
        rewards: ``[M]`` token rewards.
        values: ``[M]`` V at the state in which each token is chosen.
        lengths: ``[S]``.
        discount: γ.
        trace: λ.

    Returns:
        Advantages ``[M]`` and returns ``[M]``, A + V: what the critic should say.

    >>> r, v, n = torch.tensor([0.0, 0.0, 1.0]), torch.zeros(3), torch.tensor([2, 1])
    >>> gae(r + torch.tensor([0.0, 2.0, 0.0]), v, n, discount=1.0, trace=0.5)[0]
    tensor([1., 2., 1.])
    """
    sizes = lengths.tolist()
    pad = torch.nn.utils.rnn.pad_sequence
    reward, value = (pad(list(torch.split(t, sizes)), batch_first=True) for t in (rewards, values))
    after = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
    delta = reward + discount * after - value
    sums = torch.zeros_like(delta)
    running = torch.zeros_like(delta[:, 0])
    for step in reversed(range(delta.shape[1])):
        running = delta[:, step] + discount * trace * running
        sums[:, step] = running
    inside = torch.arange(delta.shape[1], device=lengths.device) < lengths[:, None]
    advantages = sums[inside]
    return advantages, advantages + values


@dataclass(frozen=True)
class Rollout:
    """What is held of a visit's start while its policy moves; each ``[M]``, one per completion token.

    Attributes:
        logprobs: log π_old.
        values: V_old.
        advantages: A.
        returns: what the critic should say.
    """

    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def take(self, index: Tensor) -> Rollout:
        """The tokens at ``index``."""
        return Rollout(*(t[index] for t in (self.logprobs, self.values, self.advantages, self.returns)))

    def to(self, device: torch.device) -> Rollout:
        """The same on ``device``."""
        return Rollout(*(t.to(device) for t in (self.logprobs, self.values, self.advantages, self.returns)))


def rollout(
    logprobs: Tensor,
    values: Tensor,
    reference: Tensor,
    rewards: Tensor,
    lengths: Tensor,
    *,
    kl: float,
    discount: float,
    trace: float,
    scaled: float,
) -> Rollout:
    """A visit's start: token rewards, advantages and returns.

    Advantages are divided by their standard deviation over all tokens and not re-centred, so that a pair's
    two responses keep pulling against each other.

    Args:
        logprobs: ``[M]`` log π_old.
        values: ``[M]`` V_old.
        reference: ``[M]`` log π_ref.
        rewards: ``[S]``, see :func:`pair_rewards`.
        lengths: ``[S]`` completion tokens.
        kl: weight of the pull towards the reference.
        discount: γ.
        trace: λ.
        scaled: 0 leaves the advantages as they are.
    """
    shaped = token_rewards(logprobs, reference, rewards, lengths, kl=kl)
    advantages, returns = gae(shaped, values, lengths, discount=discount, trace=trace)
    spread = float(advantages.std(correction=0))
    if scaled and spread > 1e-8:
        advantages = advantages / spread
    return Rollout(logprobs, values, advantages, returns)


def policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip: float) -> Tensor:
    """−min(ρ A, clip(ρ, 1 − ε, 1 + ε) A) per token, ρ = π/π_old (arXiv:1707.06347, eq. 7).

    >>> double, gain = torch.tensor([2.0]).log(), torch.tensor([1.0])
    >>> policy_loss(double, torch.zeros(1), gain, clip=0.2)
    tensor([-1.2000])
    """
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """max((V − G)², (V_old + clip(V − V_old, −ε, ε) − G)²) per token: the critic too moves by little at once.

    >>> value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2)
    tensor([0.6400])
    """
    held = old + (values - old).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (held - returns).square())


def drift(logprobs: Tensor, old: Tensor) -> Tensor:
    """ρ − 1 − log ρ per token: at least 0; its mean over samples of π_old estimates KL(π_old ‖ π)."""
    gap = logprobs - old
    return gap.expm1() - gap


def ppo(
    then: Rollout,
    logprobs: Tensor,
    values: Tensor,
    entropies: Tensor,
    *,
    clip: float,
    value: float,
    entropy: float,
) -> Losses:
    """Per-token losses: policy, plus ``value`` times the critic's, less ``entropy`` times the entropy.

    Args:
        then: the tokens as the visit's start left them.
        logprobs: ``[M]`` log π, with gradient.
        values: ``[M]`` V, with gradient.
        entropies: ``[M]`` of the policy in the state of each token, with gradient.
        clip: ε of both clipped losses.
        value: coefficient of the value loss.
        entropy: coefficient of the entropy.

    Returns:
        ``[M]`` losses, and means over the tokens: ``policy_loss``, ``value_loss``, ``entropy``, ``kl`` (see
        :func:`drift`) and ``clipped``, the share of tokens whose ρ lies outside 1 ± ε.
    """
    policy = policy_loss(logprobs, then.logprobs, then.advantages, clip=clip)
    critic = value_loss(values, then.values, then.returns, clip=clip)
    with torch.no_grad():
        ratio = (logprobs - then.logprobs).exp()
        figures = {
            "policy_loss": policy.mean(),
            "value_loss": critic.mean(),
            "entropy": entropies.mean(),
            "kl": drift(logprobs, then.logprobs).mean(),
            "clipped": ((ratio - 1).abs() > clip).to(ratio.dtype).mean(),
        }
    return policy + value * critic - entropy * entropies, figures
