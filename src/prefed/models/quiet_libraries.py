"""Silences what transformers and PEFT print."""

from __future__ import annotations

import os
import warnings


def silence_transformers() -> None:
    """Keep transformers' progress bars and notices off the terminal.

    ``TRANSFORMERS_VERBOSITY`` in the environment, whatever its value, leaves them as they are.
    """
    if "TRANSFORMERS_VERBOSITY" in os.environ:
        return
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\b")
