"""Replace a run by its replay without clients or pairs, with a certificate, although it may be killed.

The replay is made next to the run::

    RUN.forgetting/request.json    what is forgotten
    RUN.forgetting/run/            the replay; once it has its certificate, the two folders are exchanged

RUN is therefore the old run or the new one at any moment, and the same call continues a killed one. Nothing
is carried over from the old run but what the replay and :meth:`Replacement.conclude` name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefed.config import Experiment, to_toml
from prefed.core import files
from prefed.runs.copy_commits import prepared_run
from prefed.runs.descendants import FORGOTTEN, Plan, staging_of
from prefed.runs.exports_log import EXPORTS, read_copies
from prefed.runs.finished_run import read_config, read_run
from prefed.runs.summary import describe_origin
from prefed.store import RunReader, StoreError, client_file
from prefed.store.commit import path_of
from prefed.store.directory import lock


@contextmanager
def replacing(path: Path) -> Iterator[Replacement]:
    """Lock a finished run, so that its replay can replace it.

    Raises:
        StoreError: another process uses the run.
        RunError: there is none.
    """
    run = path.resolve()
    if not run.exists() and (staging_of(run) / "old").exists():
        (staging_of(run) / "run").rename(run)  # killed between the two renames of files.exchange
    if not (run / "checkpoint").is_dir():
        read_run(path)  # raises an error with the reason
    handle = lock(run, "wait for it")
    try:
        yield Replacement(run)
    finally:
        os.close(handle)


class Replacement:
    """A run, and the replay that is to take its place.

    Attributes:
        run: the run directory.
        new: that of the replay.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.staging = run, staging_of(run)
        self.new = self.staging / "run"

    def done(self, clients: Sequence[str]) -> list[Path]:
        """The certificates of clients that were forgotten by an earlier call; none unless all were."""
        excluded = read_config(self.run / "config.toml")["data"].get("exclude", ())
        if not clients or not {*clients} <= {*excluded}:
            return []
        return [path for name in clients for path in (self.run / FORGOTTEN).glob(f"{client_file(name)}.json")]

    def request(self, clients: Sequence[str], digests: Sequence[str] = ()) -> Mapping[str, Any]:
        """Write what is forgotten, or check that an earlier call wrote the same.

        Raises:
            StoreError: an earlier call was for something else, or the run changed since.
        """
        path = self.staging / "request.json"
        commit = files.file_digest(self.run / "checkpoint/COMMIT.json")
        wish = {"clients": list(clients), "pairs": list(digests), "commit": commit}
        name = hashlib.sha256(json.dumps(wish).encode()).hexdigest()[:16]
        if path.exists():
            request = files.loads_with_digest(path.read_bytes())
            self._check_same(request)
            if request["id"] != name:
                raise StoreError(f"{self.staging} is for other pairs: give the same --rows, or delete it")
            return request
        files.private_folder(self.staging)
        request = {**wish, "id": name, "asked": _now()}
        files.write(path, files.dumps_with_digest(request, indent=1), mode=0o600)
        return request

    @contextmanager
    def preparing(self) -> Iterator[Path]:
        """Make the directory of the replay, all of it or none; without it, the request is withdrawn."""
        try:
            with prepared_run(self.new) as partial:
                yield partial
        except Exception:
            shutil.rmtree(self.staging)
            raise

    def copy_starts(self, partial: Path) -> None:
        """Copy how often rounds were started: those that are repeated with new noise cost privacy again."""
        starts = self.run / "checkpoint" / "starts.json"
        files.write(partial / "checkpoint" / "starts.json", starts.read_bytes(), mode=0o600)

    def conclude(
        self, planned: Plan, request: Mapping[str, Any], without: Experiment, **more: Any
    ) -> list[Path]:
        """Write what the replay does not: settings, records of exports and certificates; and :meth:`finish`.

        Args:
            without: the experiment of the replay.
            more: further keys of the certificates.
        """
        files.write(self.new / "config.toml", to_toml(without).encode())
        for path in self.new.glob("align/**/config.toml"):
            text = path.read_text("utf-8").replace(str(self.new), str(self.run))
            files.write(path, text.encode())
        rows = [row for row in read_copies(self.run) if not Path(row["to"]).is_relative_to(self.run)]
        if rows:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            files.write(self.new / EXPORTS, text.encode(), mode=0o600)
        folder = self.new / FORGOTTEN
        files.private_folder(folder)
        for path in sorted((self.run / FORGOTTEN).glob("*.json")):
            files.write(folder / path.name, path.read_bytes(), mode=0o600)
        content = {
            "request": request["id"],
            "asked": request["asked"],
            "finished": _now(),
            **{key: value for key, value in asdict(planned).items() if key != "digests"},
            "run": self.run.name,
            "digests": {"before": _digests_of(self.run), "after": _digests_of(self.new)},
            "versions": {"prefed": version("prefed")},
            "origin": describe_origin({}),
            **more,
        }
        names = planned.clients or ("pairs",)
        for name in names:
            stem, number = client_file(name), 1
            while (place := folder / f"{stem}{'' if number == 1 else f'-{number}'}.json").exists():
                if files.loads_with_digest(place.read_bytes())["request"] == request["id"]:
                    break
                number += 1
            own = {"client": name, **content}
            files.write(place, files.dumps_with_digest(own, indent=1), mode=0o600)
        return self.finish(planned.clients)

    def finish(self, clients: Sequence[str]) -> list[Path]:
        """Exchange the folders if the replay is complete, and delete the old run; the certificates, if any.

        Raises:
            StoreError: forgetting other clients is not finished, or the run changed since it started.
        """
        run, staging = self.run, self.staging
        try:
            request = files.loads_with_digest((staging / "request.json").read_bytes())
        except FileNotFoundError:
            return []
        if sorted(request["clients"]) != sorted(clients):
            again = shlex.join(word for name in request["clients"] for word in ("--client", name))
            raise StoreError(
                f"{run}: forgetting {', '.join(map(repr, request['clients']))} is not finished; continue it "
                f"({again}), or delete {staging} to give it up"
            )
        name = request["id"]
        if not _certificates(run, name) and _certificates(self.new, name):
            self._check_same(request)
            files.exchange(self.new, run, staging / "old")
        if done := _certificates(run, name):
            # The request is removed last, so that a killed removal is continued.
            for folder in (entry for entry in staging.iterdir() if entry.is_dir()):
                shutil.rmtree(folder)
            shutil.rmtree(staging)
            files.sync(staging.parent)
        return done

    def _check_same(self, request: Mapping[str, Any]) -> None:
        if files.file_digest(self.run / "checkpoint/COMMIT.json") != request["commit"]:
            raise StoreError(
                f"{self.run} changed since forgetting started; delete {self.staging}, and repeat this "
                "command to start again"
            )


def _certificates(run: Path, request: str) -> list[Path]:
    """The certificates of a request in a run directory."""
    found = sorted((run / FORGOTTEN).glob("*.json"))
    return [path for path in found if files.loads_with_digest(path.read_bytes())["request"] == request]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _digests_of(run: Path) -> dict[str, Any]:
    """SHA-256 of the server's state and of the shared adapters, and the digests of data and rounds."""
    commit = RunReader(run).commit
    states = [
        path_of(run / "checkpoint", "server", commit.round),
        *sorted((run / "adapters").glob("*/*.safetensors")),
    ]
    return {
        "round": commit.round,
        "data": commit.fingerprint["data"],
        "rounds": commit.digests.rounds,
        **{str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in states},
    }
