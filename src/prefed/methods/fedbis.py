"""FedBis: federated averaging of a selector (FedBiscuit, arXiv:2407.03038).

A selector reads a prompt and two responses, A and B, and answers with the letter of the better one. In every
round (section 4 and appendix A)::

    server   samples a cohort S and broadcasts φ
    client   φ_i ← φ; K local steps on the cross-entropy of the letters, both orders of each pair   eqs. 3, 7
    server   φ ← Σ_{i∈S} p_i φ_i,  p_i = n_i / Σ_{m∈S} n_m
         or  φ ← (M/A) Σ_{i∈S} p_i φ_i,  p_i = n_i / Σ_m n_m, with A = |S| of M clients             eq. 8

The server then labels responses to its own prompts with φ, and aligns a model on these pairs (section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from prefed.core import Layout, Merged, Method, Round, State, Upload
from prefed.merge import Aggregator
from prefed.merge.config import PRODUCT_RULES
from prefed.methods.base import FedAvgBase, SelectorSettings, lora_parts

SOURCE = "FedBis (arXiv:2407.03038), section 4"
COUNTS_CLIENTS = "with mean = 'eq8', its merge divides by the pairs of all clients"


class Settings(SelectorSettings):
    """Settings of FedBis. Tables 3 and 4 of the paper: these defaults, 500 rounds, cohorts of 5 or 10."""

    mean: Literal["normalised", "eq8"] = Field(
        "normalised",
        description="weights of uploads: normalised by the pairs of the cohort, or as in eq. 8 of the paper, "
        "where they sum to 1 only on average over cohorts",
    )


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """FedBis over ``layout``.

    Raises:
        ValueError: ``mean = "eq8"`` cannot be combined with ``[merge]``.
    """
    config = aggregator.config
    usual = (config.rule, config.weights, config.optimizer.name) == ("mean", "samples", "none")
    if settings.mean == "eq8" and not (usual and config.lora not in PRODUCT_RULES):
        raise ValueError(
            "mean = 'eq8' requires rule 'mean', weights 'samples', optimizer 'none' and a lora other than "
            "'fedex', 'flexlora' and 'flora' in [merge]; otherwise set mean = 'normalised'"
        )
    fedavg = FedAvgBase.of(settings, aggregator, rounds)

    def merge(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
        merged, report = fedavg.merge(server, uploads, now)
        if settings.mean == "normalised":
            return merged, report
        # Eq. 8 is the normalised mean times the sum of its weights.
        masses = sum(upload.weight for upload in uploads) / sum(now.weights.values())
        factor = len(now.weights) / len(uploads) * masses
        model = merged.tensors["model"]
        scaled = model.select(fedavg.share(model, now)) * factor
        return merged.update({"model": model.replace(scaled)}), {**report, "factor": factor}

    late = fedavg.late(averages=settings.mean == "normalised")
    train = fedavg.exchange(merge=merge, late=late)
    return fedavg.method("fedbis", SOURCE, train)
