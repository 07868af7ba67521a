"""A finished run's models, judged again, on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefed.metrics import MEAN_METRICS
from prefed.report.tables import clients_table, unseen_table
from prefed.runs.figures import REWARDED, figures_of

if TYPE_CHECKING:
    from rich.console import Console

    from prefed.runs.evaluate import Evaluation

__all__ = ["print_evaluation"]


def print_evaluation(evaluation: Evaluation, name: str, console: Console) -> None:
    """Each client's figures, those of clients that never took part, and what a reader should know.

    Args:
        evaluation: of the run's models.
        name: the run's.
        console: where to write.
    """
    if evaluation.figures:
        figures = {n: figure for n, figure in figures_of(evaluation.figures).items() if n not in MEAN_METRICS}
        usual = [figure for n, figure in figures.items() if n not in REWARDED]
        title = f"{name}: share of {evaluation.what} ordered rightly"
        console.print(clients_table(title, usual, evaluation.pairs.get))
        rewarded = [figures[n] for n in ("preference_accuracy", *REWARDED) if n in figures]
        if len(rewarded) > 1:
            title = f"{name}: with the reward head"
            console.print(clients_table(title, rewarded, evaluation.pairs.get))
        margin, loss = evaluation.figures["margin"], evaluation.figures["dpo_loss"]
        console.print(f"mean margin {margin['mean']:.3f} nats, mean DPO loss {loss['mean']:.4f}")
        if "explicit_margin" in evaluation.figures:
            explicit = evaluation.figures["explicit_margin"]["mean"]
            console.print(f"mean margin of the reward head {explicit:.3f}")
    if evaluation.unseen:
        console.print(unseen_table(evaluation.unseen))
    for note in evaluation.notes:
        console.print(note, markup=False, soft_wrap=True)
