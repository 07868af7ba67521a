"""``prefed data FILE``."""

from __future__ import annotations

from pathlib import Path

from prefed.ui.cli.arguments import CellName, File, Overrides
from prefed.ui.cli.output import AsJson, print_json


def data(file: File, overrides: Overrides = None, cell: CellName = None, as_json: AsJson = False) -> None:
    """Show what each client would hold, before anything trains."""
    from tempfile import TemporaryDirectory

    from prefed.config.table import load_cell

    # Errors in the file are found before PyTorch is imported, which takes seconds.
    experiment = load_cell(file, cell, overrides or [])
    from prefed.data.statistics import dataset_statistics
    from prefed.models.notices import silence_transformers
    from prefed.runs.build import build_data
    from prefed.runs.data_notices import data_notices
    from prefed.trackers.terminal import Terminal, stdout_console
    from prefed.ui.pages.dataset import print_dataset_statistics

    silence_transformers()
    with TemporaryDirectory(prefix="prefed-data-") as folder:
        dataset = build_data(experiment, Path(folder) / "data")
        statistics, (notes, warnings) = dataset_statistics(dataset), data_notices(dataset)
    if as_json:
        print_json({**statistics.model_dump(mode="json"), "notes": notes, "warnings": warnings})
    else:
        terminal = Terminal(stdout_console())
        print_dataset_statistics(statistics, terminal.console)
        for note in notes:
            terminal.on_note(note)
        for warning in warnings:
            terminal.on_warning(warning)
