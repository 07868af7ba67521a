"""The server aligns its own model with only prompts and selectors, in stages.

Source: FedBiscuit (ICLR 2025), stage 2. A stage has named inputs and outputs in a folder, continues where it
was stopped, and can be run again by itself.
"""

from typing import TYPE_CHECKING

from prefed.core.lazy import attach

if TYPE_CHECKING:
    from prefed.align.alignment import Alignment, ClientPrompts, KnownTastes, Scorer, Selectors
    from prefed.align.policy import AlignError
    from prefed.align.run import STAGES, align
    from prefed.align.start import check_inputs

__all__ = [
    "STAGES",
    "AlignError",
    "Alignment",
    "ClientPrompts",
    "KnownTastes",
    "Scorer",
    "Selectors",
    "align",
    "check_inputs",
]

__getattr__ = attach(__name__, __file__)
