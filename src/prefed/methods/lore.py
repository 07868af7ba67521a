"""LoRe: low-rank personal rewards (Bose et al. 2025, arXiv:2504.14439), with federated averaging.

A client mixes K shared linear rewards of a frozen hidden state h. In every round::

    server   samples a cohort S and broadcasts the basis B ∈ R^{K×d}
    client   B_i ← B; K local steps on B_i and its own weights w_i = softmax(v_i):
                 loss = −log σ(w_i · B_i h(x, y_w) − w_i · B_i h(x, y_l))
             sends B_i, keeps v_i
    server   B ← Σ_{i∈S} p_i B_i

A newcomer fits only its weights to a few pairs.
"""

from __future__ import annotations

from prefed.core import Layout, Method
from prefed.merge import Aggregator
from prefed.methods.base.mixtures import MIXTURE, MixingSettings, mixing_method

SOURCE = "LoRe (arXiv:2504.14439), with federated averaging"


class Settings(MixingSettings):
    """Settings of LoRe; ``[model.mixture] count`` is the rank K."""


def needs(settings: Settings) -> frozenset[str]:
    """The shared rewards, and a client's weights."""
    return frozenset({"basis", MIXTURE})


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """LoRe over ``layout``."""
    return mixing_method("lore", SOURCE, settings, aggregator, rounds)
