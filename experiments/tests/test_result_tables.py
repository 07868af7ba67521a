"""The tables of the page of results: what their cells hold."""

from __future__ import annotations

import re

from experiment_scripts import EXPERIMENTS as HERE
from prefed.config.experiment_table import load_cell


def test_the_readmes_name_files_and_cells_that_are_there():
    pages = [(path, path.read_text("utf-8")) for path in sorted(HERE.rglob("*.md"))]
    files = [(path, file) for path, text in pages for file in re.findall(r"experiments/(\S+\.toml)", text)]
    cells = [pair for _, text in pages for pair in re.findall(r"experiments/(\S+\.toml) --cell (\S+)", text)]
    assert [(path, file) for path, file in files if not list(HERE.glob(file))] == []
    assert len([load_cell(HERE / file, cell) for file, cell in cells]) >= 4
