"""FedVPL: a selector with a reward that depends on the latent taste z of each client (arXiv:2605.30873).

The baseline of FedVPA-GP: variational preference learning (VPL, arXiv:2408.10075) with federated averaging.
In every round::

    server   samples a cohort S and broadcasts φ
    client   φ_i ← φ; K local steps. Each draws a batch and a disjoint context:
                 z ~ q(z | context) = N(μ, σ²);  loss = −log σ(b + r(y_w, z) − r(y_l, z)) + β KL(q ‖ N(0, I))
             sends φ_i, and its posterior under φ over contexts of all its pairs,
                 μ̄ = mean μ, σ̄² = mean σ² + Var μ
    server   φ ← Σ_{i∈S} p_i φ_i

b is the log-odds of the chosen response under the frozen model. A client judges with z = μ̄ of its training
pairs. A newcomer infers z from a few pairs.
"""

from __future__ import annotations

from prefed.core import Layout, Method, Objective
from prefed.merge import Aggregator
from prefed.methods.base.tastes import Tastes, TasteSettings, taste_parts
from prefed.train.losses import LATENT

SOURCE = "FedVPL (arXiv:2605.30873)"
SINGLE_UPLOADS = "its server stores each client's posterior"
COUNTS_CLIENTS = "its server stores a posterior for every client"


class Settings(TasteSettings):
    """Settings of FedVPL: N(0, I) as the prior of every client.

    >>> goal = Settings(beta=0.01).goal()
    >>> goal.name, goal.settings["beta"], goal.settings["prior"]
    ('latent', 0.01, 0.0)
    """

    def goal(self) -> Objective:
        """The loss that clients minimise."""
        return Objective(LATENT.name, LATENT.resolve({"beta": self.beta}))


needs = taste_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedVPL over ``layout``."""
    tastes = Tastes.over(settings, aggregator, rounds)
    return tastes.taste_method("fedvpl", SOURCE, tastes.exchange())
