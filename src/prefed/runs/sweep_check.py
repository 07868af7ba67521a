"""What a sweep refuses before its first run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from prefed.config import ConfigError, Experiment
from prefed.data import DataConfig, DataError
from prefed.data.errors import ErrorCollector
from prefed.data.sources.files import read_rows
from prefed.data.sources.folders import data_files
from prefed.data.sources.hub import looks_like_hub_name
from prefed.runs.sweep import SweepCell


def check_cells(cells: Sequence[SweepCell]) -> None:
    """See that every cell is valid, fits what is there already, and has its files.

    Raises:
        ConfigError: a cell's settings are not valid, an override sets what the table says, or there are no
            validation pairs to choose a rate on.
        ValueError: a run directory holds a run of other settings, or a file or folder is missing.
    """
    missing: dict[str, str] = {}
    experiments: list[Experiment] = []
    for cell in cells:
        _check_overrides(cell)
        run = cell.first()
        run.check()
        experiments.append(run.experiment)
        for path in missing_paths(run.experiment, cell.definition.path.parent):
            where = f"{cell.definition.path}, cell {cell.definition.name}"
            if not Path(path).is_absolute():
                folders = dict.fromkeys((cell.definition.path.parent.resolve(), Path.cwd()))
                where += f"; looked in {' and '.join(map(str, folders))}"
            missing.setdefault(path, f"{path} ({where})")
    if missing:
        raise ValueError(
            f"there is no {', '.join(missing.values())}; say with --set where it lies, or prepare it as the "
            "README beside the experiment says"
        )
    for cell, experiment in zip(cells, experiments, strict=True):
        if cell.definition.rates and not may_have_validation_pairs(experiment.data):
            raise ConfigError(
                f"{cell.definition.path}, cell {cell.definition.name}: rates are chosen on validation pairs, "
                "and there are none: set data.validation or data.validation_fraction in the base"
            )


def _check_overrides(cell: SweepCell) -> None:
    for override in cell.overrides:
        key = override.partition("=")[0].strip()
        if key == "seed" or (cell.definition.rates and key in ("method.lr", "evaluate.split")):
            raise ConfigError(f"--set {override}: seeds and rates are the table's: change them there")


def missing_paths(experiment: Experiment, beside: Path) -> Iterator[str]:
    """The files and folders that an experiment names and that are not there; its file lies in ``beside``."""
    reward = getattr(experiment.method.settings, "reward_model", None)
    fleet, graph = experiment.fleet, experiment.whole_graph
    named = [reward, fleet.trace if fleet else None, graph.file if graph else None]
    for path in [*(source.path for _, _, source in experiment.data.sources()), *filter(None, named)]:
        if not looks_like_hub_name(path) and not Path(path).exists():
            yield path
    model = Path(experiment.model.name).expanduser()
    folders = [Path(), beside]
    # A name without a slash, or an owner and a name, is a hub name unless its folder is on this machine.
    local = len(model.parts) != 1 and any((folder / model).parent.is_dir() for folder in folders)
    if not model.exists() and (local or model.is_absolute() or len(model.parts) > 2):
        yield experiment.model.name


def may_have_validation_pairs(data: DataConfig) -> bool:
    """Whether settings, or the first rows of files on this machine, speak of validation pairs."""
    if data.validation is not None or data.validation_fraction:
        return True
    if data.columns is not None:
        return data.columns.split is not None
    for role, _, source in data.sources():
        if role == "train" and not Path(source.path).exists():
            return True  # on the hub: its rows may say
        for file in data_files(Path(source.path), source.split or role) if role == "train" else ():
            try:
                rows = read_rows(file, data.encoding, ErrorCollector())
                if any("split" in row for row, _ in islice(rows, 1)):
                    return True
            except DataError:
                return True  # the run says what is wrong with the file
    return False
