"""Offline PPO on preference pairs, as pure functions (FedPDPO, arXiv:2603.19741, D.3.1).

The clipped losses are those of PPO (arXiv:1707.06347). π_old is the policy at the start of a visit. The
responses come from the data, but the losses treat them as samples of π_old, and no importance weight corrects
for the difference. FedPDPO compares with this variant. It is not PPO on a policy's own samples.

Values per completion token are concatenated over S responses to ``[M]``; ``lengths`` ``[S]`` gives each
response's number of tokens. Pairs lie in order, the chosen response before the rejected one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefed.core.lazy import torch
from prefed.train.losses.batch import LossOutput

if TYPE_CHECKING:
    from torch import Tensor


SCORE_LIMIT = 5.0
"""The largest absolute value of a standardised score."""
KL_TOLERANCE = 1.5
"""A phase stops at a batch whose mean :func:`kl_estimate` is above this many times ``target_kl``."""


def standardize(scores: Tensor) -> Tensor:
    """A reward model's scores minus their mean, divided by their standard deviation and clipped to ±5.

    Args:
        scores: ``[n, 2]`` scores of a client's training pairs. If all are equal, the result is 0.

    >>> standardize(torch.tensor([[1.0, 3.0], [3.0, 1.0]]))
    tensor([[-1.,  1.],
            [ 1., -1.]])
    """
    wide = scores.double()
    centred = wide - wide.mean()
    spread = centred.square().mean().sqrt()
    if spread <= 1e-12 * wide.abs().max():
        return torch.zeros_like(scores)
    return (centred / spread).clamp(-SCORE_LIMIT, SCORE_LIMIT).to(scores.dtype)


def pair_rewards(scores: Tensor) -> Tensor:
    """R(y_w) = d/2 and R(y_l) = −d/2 with d = r(x, y_w) − r(x, y_l).

    Args:
        scores: ``[n, 2]`` standardised scores r.

    Returns:
        ``[n, 2]``. d < 0 where the reward model prefers the response that is labelled rejected.

    >>> pair_rewards(torch.tensor([[2.0, -1.0]]))
    tensor([[ 1.5000, -1.5000]])
    """
    half = (scores[:, :1] - scores[:, 1:]) / 2
    return torch.cat([half, -half], 1)


def token_rewards(
    logprobs: Tensor, reference: Tensor, rewards: Tensor, lengths: Tensor, *, kl: float
) -> Tensor:
    """−kl (log π_old − log π_ref) at every token, plus the response's reward at its last token.

    Args:
        logprobs: ``[M]`` log π_old.
        reference: ``[M]`` log π_ref.
        rewards: ``[S]`` R.
        lengths: ``[S]`` tokens of each response, at least 1.

    Returns:
        ``[M]``.
    """
    result = -kl * (logprobs - reference)
    result[lengths.cumsum(0) - 1] += rewards
    return result


def gae(
    rewards: Tensor, values: Tensor, lengths: Tensor, *, discount: float, trace: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (arXiv:1506.02438, eq. 16) of each response on its own.

    A_t = Σ_k (γλ)^k δ_{t+k} with δ_t = r_t + γ V_{t+1} − V_t. After a response's last token V is 0.

    Args:
        rewards: ``[M]`` token rewards.
        values: ``[M]`` V at the state before each token.
        lengths: ``[S]``.
        discount: γ.
        trace: λ.

    Returns:
        Advantages A ``[M]`` and returns A + V ``[M]``, the critic's targets.

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
    """Values of the policy at a visit's start, one per completion token: each is ``[M]``.

    They stay the same while the visit trains the policy.

    Attributes:
        logprobs: log π_old.
        values: V_old.
        advantages: A.
        returns: the critic's targets.
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
    """The rollout at a visit's start, with advantages and returns from token rewards.

    Advantages are divided by their standard deviation over all tokens. Their mean is not subtracted, so that
    the advantages of a pair's two responses keep their opposite signs. The other arguments are those of
    :func:`token_rewards` and :func:`gae`.

    Args:
        scaled: 0 to leave the advantages undivided.
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
    """max((V − G)², (V_old + clip(V − V_old, −ε, ε) − G)²) per token.

    The clip bounds the critic's move, as :func:`policy_loss` bounds the policy's.

    >>> value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2)
    tensor([0.6400])
    """
    clipped = old + (values - old).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (clipped - returns).square())


def kl_estimate(logprobs: Tensor, old: Tensor) -> Tensor:
    """ρ − 1 − log ρ per token. It is at least 0; its mean over samples of π_old estimates KL(π_old ‖ π)."""
    log_ratio = logprobs - old
    return log_ratio.expm1() - log_ratio


def ppo(
    old: Rollout,
    logprobs: Tensor,
    values: Tensor,
    entropies: Tensor,
    *,
    clip: float,
    value: float,
    entropy: float,
) -> LossOutput:
    """The loss of each token: policy loss + ``value`` · value loss − ``entropy`` · entropy.

    Args:
        old: the same tokens at the visit's start.
        logprobs: ``[M]`` log π, with gradient.
        values: ``[M]`` V, with gradient.
        entropies: ``[M]`` entropy of the policy at the state before each token, with gradient.
        clip: ε of both clipped losses.

    Returns:
        ``[M]`` losses, and means over the tokens: ``policy_loss``, ``value_loss``, ``entropy``, ``kl`` (see
        :func:`kl_estimate`) and ``clipped``, the share of tokens whose ρ lies outside 1 ± ε.
    """
    policy = policy_loss(logprobs, old.logprobs, old.advantages, clip=clip)
    critic = value_loss(values, old.values, old.returns, clip=clip)
    with torch.no_grad():
        ratio = (logprobs - old.logprobs).exp()
        metrics = {
            "policy_loss": policy.mean(),
            "value_loss": critic.mean(),
            "entropy": entropies.mean(),
            "kl": kl_estimate(logprobs, old.logprobs).mean(),
            "clipped": ((ratio - 1).abs() > clip).to(ratio.dtype).mean(),
        }
    return policy + value * critic - entropy * entropies, metrics
