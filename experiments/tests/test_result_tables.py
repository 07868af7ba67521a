"""The tables of the page of results: what their cells hold."""

from __future__ import annotations

import re
from pathlib import Path

from experiment_scripts import EXPERIMENTS as HERE
from prefed.config.experiment_table import load_cell
from prefed.runs.sweep import sweep_cells

EVERY = {path.stem: sweep_cells(path, Path("out")) for path in sorted((HERE / "tables").glob("*.toml"))}
"""Table → its cells, for the tables of the page of results."""


def test_the_readmes_name_files_and_cells_that_are_there():
    pages = [(path, path.read_text("utf-8")) for path in sorted(HERE.rglob("*.md"))]
    files = [(path, file) for path, text in pages for file in re.findall(r"experiments/(\S+\.toml)", text)]
    cells = [pair for _, text in pages for pair in re.findall(r"experiments/(\S+\.toml) --cell (\S+)", text)]
    assert [(path, file) for path, file in files if not list(HERE.glob(file))] == []
    assert len([load_cell(HERE / file, cell) for file, cell in cells]) >= 4


def settings_of(cell):
    """The method of a cell's run, with its settings."""
    return cell.run_of(42, {"lr": 1e-3}).experiment.method


def test_opposed_clients_get_the_same_steps_under_every_method():
    """Four optimiser steps (FedALA: three, and one of its weights; eighty at once for the pooled twenty
    clients) of eight pairs a round, at a constant rate; in FedPDPO's table also its paper's eight."""
    opposed = [name for name in EVERY if name.startswith("opposed") or name == "fedpdpo"]
    methods = set()
    for table, each in ((name, each) for name in opposed for each in EVERY[name]):
        twice = table == "fedpdpo" and each.definition.name.endswith("-4")
        method = settings_of(each)
        settings, name = method.settings, method.name
        methods.add(name)
        assert (settings.batches(), settings.schedule) == ((8, 1), "constant")
        steps = settings.local_steps
        if name in ("fedpdpo", "fedrep", "ditto"):
            steps += settings.personal_phase()["steps"]
        elif name == "perfedavg":
            steps *= 1 + settings.inner_steps
        elif name == "pfedme":
            steps *= settings.inner_steps
        elif name == "fedala":
            assert settings.weight_steps == settings.first_weight_steps == 1
            steps += settings.weight_steps
        assert steps == (80 if name == "centralized" else 8 if twice else 4), name
    assert len(methods) == 15
