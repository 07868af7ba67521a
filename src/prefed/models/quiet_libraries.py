"""Silence the output of transformers and PEFT."""

from __future__ import annotations

import os
import warnings


def silence_transformers() -> None:
    """Disable progress bars and notices of transformers, unless ``TRANSFORMERS_VERBOSITY`` is set."""
    if "TRANSFORMERS_VERBOSITY" in os.environ:
        return
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\b")
