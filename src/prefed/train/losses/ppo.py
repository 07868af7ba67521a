"""Offline PPO on preference pairs, as pure functions (FedPDPO, arXiv:2603.19741, D.3.1).

The clipped losses are those of PPO (arXiv:1707.06347), and π_old is the policy at the start of a visit.
Responses come from the data but are treated as samples of π_old, without importance weights. FedPDPO compares
with this variant; it is not on-policy PPO.

Values per completion token are concatenated over S responses to ``[M]``; ``lengths`` ``[S]`` is the number of
tokens of each response. The chosen response of a pair precedes the rejected one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefed.core.lazy import torch
from prefed.train.feedback.kind import LossOutput

if TYPE_CHECKING:
    from torch import Tensor


SCORE_LIMIT = 5.0
"""Maximum absolute value of a standardised score."""
KL_TOLERANCE = 1.5
"""A phase stops if the mean :func:`kl_estimate` of a batch exceeds this multiple of ``target_kl``."""


def standardize(scores: Tensor) -> Tensor:
    """Subtract the mean from reward scores, divide by their standard deviation, and clip to ±5.

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
    """Return R(y_w) = d/2 and R(y_l) = −d/2 with d = r(x, y_w) − r(x, y_l), as ``[n, 2]``.

    Args:
        scores: ``[n, 2]`` standardised scores r.

    >>> pair_rewards(torch.tensor([[2.0, -1.0]]))
    tensor([[ 1.5000, -1.5000]])
    """
    half = (scores[:, :1] - scores[:, 1:]) / 2
    return torch.cat([half, -half], 1)


def token_rewards(
    logprobs: Tensor, reference: Tensor, rewards: Tensor, lengths: Tensor, *, kl: float
) -> Tensor:
    """Return −kl (log π_old − log π_ref) for each token, plus the reward at the last token of a response.

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
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) for each response.

    A_t = Σ_k (γλ)^k δ_{t+k} with δ_t = r_t + γ V_{t+1} − V_t. V is 0 after the last token of a response.

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
    """Constants of a visit, computed from the policy at its start: one value per token, each ``[M]``.

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
        """Return the tokens at ``index``."""
        return Rollout(*(t[index] for t in (self.logprobs, self.values, self.advantages, self.returns)))

    def to(self, device: torch.device) -> Rollout:
        """Return a copy on ``device``."""
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
    """Compute the rollout at the start of a visit.

    Advantages are divided by their standard deviation over all tokens. Their mean is not subtracted, so the
    advantages of both responses of a pair keep opposite signs. For the other arguments see
    :func:`token_rewards` and :func:`gae`.

    Args:
        scaled: 0 disables the division.
    """
    shaped = token_rewards(logprobs, reference, rewards, lengths, kl=kl)
    advantages, returns = gae(shaped, values, lengths, discount=discount, trace=trace)
    spread = float(advantages.std(correction=0))
    if scaled and spread > 1e-8:
        advantages = advantages / spread
    return Rollout(logprobs, values, advantages, returns)


def policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip: float) -> Tensor:
    """Return −min(ρ A, clip(ρ, 1 − ε, 1 + ε) A) per token, ρ = π/π_old (arXiv:1707.06347, eq. 7).

    >>> double, gain = torch.tensor([2.0]).log(), torch.tensor([1.0])
    >>> policy_loss(double, torch.zeros(1), gain, clip=0.2)
    tensor([-1.2000])
    """
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Return max((V − G)², (V_old + clip(V − V_old, −ε, ε) − G)²) per token.

    >>> value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2)
    tensor([0.6400])
    """
    clipped = old + (values - old).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (clipped - returns).square())


def kl_estimate(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return ρ − 1 − log ρ ≥ 0 per token; its mean over samples of π_old estimates KL(π_old ‖ π)."""
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
    """Return the loss of each token: policy loss + ``value`` · value loss − ``entropy`` · entropy.

    Args:
        old: rollout of the same tokens.
        logprobs: ``[M]`` log π, with gradient.
        values: ``[M]`` V, with gradient.
        entropies: ``[M]`` entropy of the policy in the state before each token, with gradient.
        clip: ε of both clipped losses.

    Returns:
        ``[M]`` losses, and means over tokens: ``policy_loss``, ``value_loss``, ``entropy``, ``kl`` (see
        :func:`kl_estimate`) and ``clipped``, the share of tokens with ρ outside 1 ± ε.
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
