"""``prefed new``: a package for the user's own method."""

from __future__ import annotations

import keyword
import os
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from prefed.ui.cli.errors_and_interrupts import UsageError

PROJECT = """\
[build-system]
requires = ["setuptools>=70.1"]
build-backend = "setuptools.build_meta"

[project]
name = "NAME"
version = "0.1.0"
description = "A method for prefed"
requires-python = ">=3.11"
dependencies = ["prefed"]

[project.entry-points."prefed.methods"]
NAME = "NAME:METHOD"

[tool.setuptools]
package-dir = { "" = "src" }
py-modules = ["NAME"]

[tool.pytest.ini_options]
testpaths = ["tests"]
"""
METHOD = '''\
"""NAME: FedDPO in which a client moves the shared model by a bounded step.

In every round::

    server   samples a cohort S and broadcasts φ
    client   φ_i ← φ; local training on L_i;  Δ_i = φ_i − φ
             sends φ + Δ_i · min(1, r / ‖Δ_i‖)
    server   φ ← Σ_{i∈S} p_i φ_i
"""

from __future__ import annotations

from pydantic import Field

from prefed.core import ClientTrainer, Download, Layout, Method, State, Upload
from prefed.merge import Aggregator
from prefed.methods import MethodKind
from prefed.methods.base import FedAvgBase, LocalSettings, lora_parts

SOURCE = "clipping-enabled FedAvg (arXiv:2106.13673)"
METHOD = MethodKind("NAME", "FedDPO with bounded client updates", module=__name__)


class Settings(LocalSettings):
    """Settings of NAME."""

    radius: float = Field(1.0, ge=0, description="largest norm r of a client's update; 0 gives FedDPO")


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    """NAME over ``layout``."""
    fedavg = FedAvgBase.of(settings, aggregator, rounds)

    def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
        start = fedavg.start(trainer, private, download)
        result = trainer.train(start, fedavg.phase(trainer, download))
        trained, received = (fedavg.share(model, trainer.round) for model in (result.tensors, start))
        length = (trained - received).norm()
        if settings.radius and length > settings.radius:
            trained = received + (trained - received) * (settings.radius / length)
        model = result.tensors.replace(trained)
        return fedavg.upload(trainer, model, result.loss), fedavg.keep(private, model)

    return fedavg.method("NAME", SOURCE, fedavg.exchange(work=work))
'''
TEST = '''\
"""NAME holds the laws of every method, and its own."""

import pytest
from NAME import METHOD

from prefed.methods import METHODS
from prefed.testing import Problem, Quadratic, check_method, simulate

STEP = {"optimizer": "sgd", "lr": 1.0, "clip": 0.0, "weight_decay": 0.0, "local_steps": 1}


def test_laws_of_every_method():
    check_method("NAME")


def test_without_a_bound_it_is_feddpo():
    one, other = (
        Problem(kind, own).run() for kind, own in ((METHOD, {"radius": 0.0}), (METHODS["feddpo"], {}))
    )
    assert one.server.tensors["model"].equal(other.server.tensors["model"])


def test_a_client_moves_by_at_most_the_radius():
    """A step of rate 1 on ½‖φ − a‖² goes from 0 to a = (3, 4, 0, …), of length 5; the bound 2 leaves 2/5."""
    problem = Problem(METHOD, {**STEP, "radius": 2.0})
    zero = [0.0] * (problem.initial.layout.size - 2)
    client = Quadratic.at([3.0, 4.0, *zero])
    run = simulate(problem.build(), {"a": client}, problem.initial * 0.0, rounds=1)
    assert run.server.tensors["model"].flat.tolist() == pytest.approx([1.2, 1.6, *zero])
'''
FILES = {"pyproject.toml": PROJECT, "src/NAME.py": METHOD, "tests/test_NAME.py": TEST}
"""Path in the package → content; ``NAME`` is replaced by the method's name in both."""


def new(
    what: Annotated[str, typer.Argument(metavar="method", help="What to write: method.", show_default=False)],
    name: Annotated[str, typer.Argument(help="The method's name; also the folder.", show_default=False)],
) -> None:
    """Create a package for your own method, which works and passes its tests."""
    if what != "method":
        raise UsageError(f"prefed new {what}: use `prefed new method NAME`")
    _check_name(name)
    folder, partial = Path(name), Path(f".{name}.{os.getpid()}.partial")
    try:
        for path, text in FILES.items():
            file = partial / path.replace("NAME", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("NAME", name), "utf-8")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    typer.echo(
        f"wrote {folder}; next: `pip install -e {name} && pytest {name}`, then edit {folder}/src/{name}.py"
    )


def _check_name(name: str) -> None:
    """Raise an error if a method cannot have this name, or something else has it."""
    from importlib.util import find_spec

    from prefed.methods import METHODS

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} cannot name a method: use lower-case letters, digits and _, starting with a letter, "
            "e.g. my_method"
        )
    if name in list(METHODS):
        raise UsageError(f"there is already a method {name!r}; choose another name")
    if os.path.lexists(name):
        raise ValueError(f"{name} exists; choose another name, or work in another folder")
    if find_spec(name) is not None:
        raise UsageError(f"there is already a Python module {name!r}; choose another name")
