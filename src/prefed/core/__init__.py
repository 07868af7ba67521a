"""Basic types: tensors, owners, keys, phases, messages, methods. Does not import other packages of prefed."""

from typing import TYPE_CHECKING

from prefed.core.lazy import attach

if TYPE_CHECKING:
    from prefed.core.callback import Callback, Callbacks
    from prefed.core.method import (
        OPTIMIZER,
        POOLED,
        ClientTrainer,
        Download,
        Exchange,
        Merged,
        Method,
        Moments,
        Objective,
        Optimizer,
        Penalty,
        Phase,
        PhaseResult,
        Plain,
        Proximal,
        Round,
        State,
        Upload,
    )
    from prefed.core.privacy import NO_MINIMUM, Privacy
    from prefed.core.random_keys import Key
    from prefed.core.tensors import Entry, Layout, Owner, Ownership, Tensors

__all__ = [
    "NO_MINIMUM",
    "OPTIMIZER",
    "POOLED",
    "Callback",
    "Callbacks",
    "ClientTrainer",
    "Download",
    "Entry",
    "Exchange",
    "Key",
    "Layout",
    "Merged",
    "Method",
    "Moments",
    "Objective",
    "Optimizer",
    "Owner",
    "Ownership",
    "Penalty",
    "Phase",
    "PhaseResult",
    "Plain",
    "Privacy",
    "Proximal",
    "Round",
    "State",
    "Tensors",
    "Upload",
]

attach(__name__, __file__)
