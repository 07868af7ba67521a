"""PAL: ideal points as mixtures of shared prototypes (Chen et al. 2024, arXiv:2406.08469), with FedAvg.

Model A of PAL. A client prefers the response whose projection is closer to its ideal point. In every round::

    server   samples a cohort S and broadcasts the projection f and the prototypes p_1, …, p_K, as φ
    client   φ_i ← φ; K local steps on φ_i and its own weights w_i = softmax(v_i), with a_i = Σ_k w_ik p_k:
                 loss = −log σ(‖f(h(x, y_l)) − f(a_i)‖ − ‖f(h(x, y_w)) − f(a_i)‖)
             sends φ_i, keeps v_i
    server   φ ← Σ_{i∈S} p_i φ_i

h is a frozen hidden state. A newcomer fits only its weights to a few pairs.
"""

from __future__ import annotations

from pydantic import Field

from prefed.core import Layout, Method
from prefed.merge import Aggregator
from prefed.methods.base.mixtures import MIXTURE, MixingSettings, mixing_method

SOURCE = "PAL (arXiv:2406.08469), model A, with federated averaging"


class Settings(MixingSettings):
    """Settings of PAL; ``[model.mixture] count`` is the number of prototypes K."""

    lr: float = Field(3e-3, gt=0, description="learning rate of projection and prototypes")
    weights_lr: float = Field(0.1, gt=0, description=MixingSettings.model_fields["weights_lr"].description)


def needs(settings: Settings) -> frozenset[str]:
    """Projection and prototypes, and a client's weights."""
    return frozenset({"ideal", MIXTURE})


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """PAL over ``layout``."""
    return mixing_method("pal", SOURCE, settings, aggregator, rounds)
