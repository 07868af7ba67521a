#!/usr/bin/env python3
"""The outputs that notebooks show: runs their cells, each in a kernel of its own, and writes what they print.

python scripts/tutorial.py                            # docs/tutorial.ipynb
python scripts/tutorial.py docs/examples/*.ipynb      # several, in one folder, whose files they share
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

TUTORIAL = Path(__file__).resolve().parents[1] / "docs" / "tutorial.ipynb"


def execute(notebook: Path, folder: Path) -> Any:
    """Run a notebook's cells in ``folder``, and return the notebook with its outputs.

    Times, and the hints and progress bars that libraries write to standard error, are left out: they differ
    from run to run.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    book = nbformat.read(notebook, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(
        book, timeout=None, kernel_name="python3", record_timing=False, coalesce_streams=True, resources=place
    ).execute()
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return book


def main() -> None:
    """Write the outputs into the notebooks."""
    with tempfile.TemporaryDirectory() as folder:
        for notebook in map(Path, sys.argv[1:] or [TUTORIAL]):
            nbformat.write(execute(notebook, Path(folder)), notebook)


if __name__ == "__main__":
    main()
