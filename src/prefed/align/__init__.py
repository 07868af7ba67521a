"""Align a model of the server with prompts and selectors, in stages that can be continued and repeated.

Source: FedBiscuit (ICLR 2025), stage 2.
"""

from typing import TYPE_CHECKING

from prefed.core.lazy import attach

if TYPE_CHECKING:
    from prefed.align.alignment import (
        Alignment,
        ClientPrompts,
        Clients,
        KnownTastes,
        Scorer,
        Selectors,
    )
    from prefed.align.policy import AlignError
    from prefed.align.prompts_and_policy import check_inputs
    from prefed.align.run import STAGES, align

__all__ = [
    "STAGES",
    "AlignError",
    "Alignment",
    "ClientPrompts",
    "Clients",
    "KnownTastes",
    "Scorer",
    "Selectors",
    "align",
    "check_inputs",
]

attach(__name__, __file__)
