"""Which epoch of an alignment is kept, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefed.core import Callback
from prefed.train.metrics import SHIFT_METRICS, broken_text, falls, health_line

SHIFT = SHIFT_METRICS[0]


def best_epoch(history: Sequence[Mapping[str, Any]]) -> int:
    """Return the epoch with the highest win rate or, without held-out prompts, the last epoch.

    Of several such epochs, it is the first with the highest agreement.

    An epoch is only kept if none has fewer flaws, since a labeller may prefer broken text: first the ways in
    which text is worse than the initial policy's (:func:`~prefed.train.metrics.broken_text`) count, then
    whether the chosen completions are less probable, beyond noise (:func:`~prefed.train.metrics.falls`).

    >>> from prefed.train.metrics import SHIFT_ERROR
    >>> rates = ((0.6, 0.9), (0.7, 0.8), (0.7, 0.9), (0.7, 0.9))
    >>> figures = [{"epoch": k, "win_rate": a, "agreement": b} for k, (a, b) in enumerate(rates, 1)]
    >>> best_epoch(figures)
    3
    >>> figures = [epoch | {SHIFT: 8.0 - 4 * epoch["epoch"], SHIFT_ERROR: 1.0} for epoch in figures]
    >>> best_epoch(figures), best_epoch(figures[3:])
    (2, 4)
    """

    def flaws(epoch: Mapping[str, Any]) -> tuple[int, bool]:
        return len(broken_text(epoch.get("text"))), falls(epoch)

    measured = [epoch for epoch in history if epoch.get("win_rate") is not None]
    if not measured:
        return int(history[-1]["epoch"])
    fewest = min(map(flaws, measured))
    whole = [epoch for epoch in measured if flaws(epoch) == fewest]
    best = max(whole, key=lambda epoch: (epoch["win_rate"], epoch["agreement"], -epoch["epoch"]))
    return int(best["epoch"])


def kept_epoch(history: list[dict[str, Any]], callback: Callback) -> int:
    """Return :func:`best_epoch`, with a warning if it may be worse than the initial policy."""
    kept, worse = best_epoch(history), []
    (epoch,) = (each for each in history if each["epoch"] == kept)
    text = epoch.get("text")
    if text is not None and broken_text(text):
        worse.append(health_line(text["shared"], text["base"]).replace("base model", "initial policy"))
    if falls(epoch):
        worse.append(
            f"the chosen held-out completions became less probable ({epoch[SHIFT]:+.1f} nats): its text may "
            "loop or be nonsense"
        )
    if (share := epoch.get("win_rate")) is not None and share < 0.5:
        worse.append(f"the labeller prefers only {share:.1%} of its answers to held-out prompts")
    if worse:
        callback.on_warning(
            f"the kept adapter may be worse than the initial policy: {', and '.join(worse)}; read some "
            'answers (prefed generate), lower align.lr, or use align.objective = "rpo" with a larger '
            "align.objective_settings.alpha"
        )
    return kept
