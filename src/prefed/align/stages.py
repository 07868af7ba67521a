"""Stages with named inputs and outputs in a folder, and a manifest of their settings and digests.

Rows are JSON lines, appended in batches; a killed process loses no complete batch.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefed.align.alignment import Alignment
from prefed.align.policy import AlignError
from prefed.core import files
from prefed.core.strict_settings import differing
from prefed.core.text import did_you_mean


def dumps(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Format rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()


def append(path: Path, rows: Iterable[Mapping[str, Any]], mode: int = 0o666) -> None:
    """Append a batch of rows with digests, and sync it to the disk."""
    files.append(path, b"".join(files.dumps_with_digest(row) + b"\n" for row in rows), mode=mode)


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file.

    Raises:
        AlignError: a line is damaged.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield files.loads_with_digest(line)
            except files.DamagedError as error:
                raise AlignError(
                    f"{path}, line {number} is damaged: {error}; run the stage that wrote it again (--stage)"
                ) from error


def whole_batches(path: Path, sizes: Iterable[int]) -> int:
    """Count the complete and undamaged batches at the start of a file, and truncate the file after them.

    Args:
        sizes: the number of lines of each batch, in the order in which they are appended.
    """
    if not path.exists():
        return 0
    batches, end = 0, 0
    with path.open("rb") as lines:
        for size in sizes:
            batch = [lines.readline() for _ in range(size)]
            if not all(map(_whole, batch)):
                break
            batches, end = batches + 1, end + sum(map(len, batch))
    files.truncate(path, end)
    return batches


def _whole(line: bytes) -> bool:
    try:
        files.loads_with_digest(line)
    except files.DamagedError:
        return False
    return line.endswith(b"\n")


Figures = Mapping[str, Any]
"""The metrics of a stage, as JSON values."""


@dataclass(frozen=True)
class Stage:
    """A stage of an alignment.

    Attributes:
        name: its name for ``--stage``.
        inputs: names of the stages whose outputs it reads, and keys of :attr:`Alignment.sources`.
        settings: returns the settings that its result depends on.
        outputs: files and folders for later stages and for users.
        work: starts or continues the work, and returns its metrics.
        parts: files that only serve to continue after a stop.
    """

    name: str
    inputs: tuple[str, ...]
    settings: Callable[[Alignment], Mapping[str, Any]]
    outputs: tuple[str, ...]
    work: Callable[[Alignment], Figures]
    parts: tuple[str, ...] = ()


def run_stages(alignment: Alignment, stages: Sequence[Stage], again: str | None = None) -> dict[str, Figures]:
    """Run all unfinished stages in order, and return the metrics of every stage.

    Before a stage starts, its manifest records settings and inputs. At its end, digests of the outputs are
    added; this single write commits the stage.

    Args:
        again: the stage to run again, with all stages after it.

    Raises:
        AlignError: a stage was started with other settings or inputs, or its outputs were changed.
    """
    kept = _kept(stages, again)
    for stage in reversed(stages[kept:]):
        forget(alignment.folder, stage)
    figures: dict[str, Figures] = {}
    digests: dict[str, Any] = dict(alignment.sources)
    for stage in stages:
        wanted = {
            "settings": _settings(alignment, stage),
            "inputs": {name: digests[name] for name in stage.inputs},
        }
        path = _manifest(alignment.folder, stage)
        before = _read(alignment.folder, stage)
        if before is not None:
            _check_same(alignment.folder, stage, before, wanted)
        if before is not None and "outputs" in before:
            check_outputs(alignment.folder, stage, before["outputs"])
            figures[stage.name] = before["figures"]
        else:
            files.write(path, files.dumps_with_digest(wanted, indent=1))
            started = time.perf_counter()
            metrics = stage.work(alignment)
            figures[stage.name] = {**metrics, "seconds": time.perf_counter() - started}
            before = {
                **wanted,
                "outputs": _outputs(alignment.folder, stage),
                "figures": figures[stage.name],
            }
            files.write(path, files.dumps_with_digest(before, indent=1))
            alignment.callback.on_stage_end(stage.name, dict(figures[stage.name]))
        digests[stage.name] = before["outputs"]
    return figures


def check_settings(alignment: Alignment, stages: Sequence[Stage], again: str | None = None) -> None:
    """Check that stages which were started and will not run again have the same settings.

    Raises:
        AlignError: they differ, or there is no stage ``again``.
    """
    for stage in stages[: _kept(stages, again)]:
        before = _read(alignment.folder, stage)
        if before is not None:
            wanted = {"settings": _settings(alignment, stage), "inputs": {}}
            _check_same(alignment.folder, stage, before, wanted)


def _kept(stages: Sequence[Stage], again: str | None) -> int:
    names = [stage.name for stage in stages]
    if again is None:
        return len(names)
    if again not in names:
        hint = did_you_mean(again, names)
        raise AlignError(f"no stage {again!r}{hint}; the stages are {', '.join(names)}")
    return names.index(again)


def _settings(alignment: Alignment, stage: Stage) -> Any:
    """Return the settings of a stage after a round trip through JSON."""
    return json.loads(json.dumps(stage.settings(alignment)))


def _manifest(folder: Path, stage: Stage) -> Path:
    return folder / "stages" / f"{stage.name}.json"


def left_anything(folder: Path, stages: Sequence[Stage]) -> bool:
    """Whether any of the stages wrote outputs or parts."""
    return any((folder / name).exists() for stage in stages for name in (*stage.outputs, *stage.parts))


def _read(folder: Path, stage: Stage) -> dict[str, Any] | None:
    """Read the manifest of a stage; ``None`` if it was not started, or failed before writing anything."""
    path = _manifest(folder, stage)
    try:
        manifest = files.loads_with_digest(path.read_bytes())
    except FileNotFoundError:
        return None
    except files.DamagedError as error:
        raise AlignError(f"{path} is damaged: {error}; run the stage again: --stage {stage.name}") from error
    return manifest if "outputs" in manifest or left_anything(folder, [stage]) else None


def _check_same(
    folder: Path, stage: Stage, before: Mapping[str, Any], wanted: Mapping[str, Mapping[str, Any]]
) -> None:
    changed = differing(before["settings"], wanted["settings"])
    lines = [f"  {name}: {old!r} → {new!r}" for name, (old, new) in changed.items()]
    lines += [
        f"  {name} changed" for name, value in wanted["inputs"].items() if before["inputs"].get(name) != value
    ]
    if lines:
        state = "was finished" if "outputs" in before else "was started"
        raise AlignError(
            f"stage {stage.name} in {folder} {state} with other settings or inputs (then → now):\n"
            + "\n".join(lines)
            + f"\nrestore them, or run this stage and all later ones again: --stage {stage.name}"
        )


def check_outputs(folder: Path, stage: Stage, digests: Mapping[str, str]) -> None:
    """Compare outputs of a stage with digests from :func:`output_digest`.

    Raises:
        AlignError: an output is missing or was changed.
    """
    for name, digest in digests.items():
        if not (folder / name).exists() or output_digest(folder / name) != digest:
            raise AlignError(
                f"{folder / name} is missing or was changed; restore it from a backup, or run stage "
                f"{stage.name} and all later ones again: --stage {stage.name}"
            )


def _outputs(folder: Path, stage: Stage) -> dict[str, str]:
    return {name: output_digest(folder / name) for name in stage.outputs if (folder / name).exists()}


def output_digest(path: Path) -> str:
    """Compute the digest of a file, or of the names and contents in a folder."""
    if path.is_file():
        return files.file_digest(path)
    names = sorted(item.relative_to(path).as_posix() for item in path.rglob("*") if item.is_file())
    return files.digest("".join(f"{name} {files.file_digest(path / name)}\n" for name in names).encode())


def forget(folder: Path, stage: Stage) -> None:
    """Delete the files of a stage, starting with its manifest."""
    files.remove(_manifest(folder, stage))
    for name in (*stage.outputs, *stage.parts):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            files.remove(folder / name)
