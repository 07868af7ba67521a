"""``prefed site`` that notes when its visits begin, and lies and lingers on request.

    python benchmarks/watched_site.py SITE.toml NOTES

``federation_faults.py`` starts it. ``NOTES/SITE.visits`` gets a line with the round as each visit begins.
``NOTES/SITE.lies`` is JSON: a round, or ``"every"``, and what this site does to its uploads in it, after its
own side has validated them; ``random_words`` is for secure sums. ``NOTES/SITE.pace`` holds the seconds that a
visit takes at least.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from prefed.core import Download, Entry, Layout, Tensors, Upload
from prefed.core.wire import decode_download, decode_upload, encode
from prefed.engines import Task
from prefed.engines.backends.processes import Worker
from prefed.networks.federation import site as site_module
from prefed.privacy.secure import Participant, Session
from prefed.ui.cli import app


def not_a_number(before: Download, upload: Upload) -> Upload:
    """One number of the model is NaN."""
    model = upload.tensors["model"].clone()
    model.flat[0] = float("nan")
    return replace(upload, tensors={"model": model})


def wrong_shapes(before: Download, upload: Upload) -> Upload:
    """The first tensor has its sides swapped: as many numbers, in another shape."""
    model = upload.tensors["model"]
    first, *rest = model.layout.entries
    swapped = Entry(first.name, first.shape[::-1], first.part, first.block, first.factor)
    return replace(upload, tensors={"model": Tensors(Layout((swapped, *rest)), model.flat)})


def another_name(before: Download, upload: Upload) -> Upload:
    """It says that it is somebody else's."""
    return replace(upload, client="somebody else")


def earlier_round(before: Download, upload: Upload) -> Upload:
    """It says that it began in the round before."""
    return replace(upload, sent_at=upload.sent_at - 1)


def fifty_times(before: Download, upload: Upload) -> Upload:
    """What the visit changed, 50 times."""
    own = upload.tensors["model"]
    start = before.tensors["model"].select(own)
    return replace(upload, tensors={"model": start + (own - start) * 50.0})


LIES: dict[str, Callable[[Download, Upload], Upload]] = {
    lie.__name__: lie for lie in (not_a_number, wrong_shapes, another_name, earlier_round, fifty_times)
}


def main() -> None:
    path, notes = sys.argv[1], Path(sys.argv[2])
    name = Path(path).parent.name

    def lie_in(number: int) -> str:
        """What this site does to its uploads in a round."""
        got = notes / f"{name}.lies"
        lies = json.loads(got.read_text()) if got.exists() else {}
        return str(lies.get("every") or lies.get(str(number), ""))

    class Liar(Participant):
        """The site in secure sums."""

        def mask(self, words: NDArray[np.uint32], session: Session) -> NDArray[np.uint32]:
            """Masked words, or random ones, which it then signs."""
            if lie_in(session.round) == "random_words":
                return np.random.default_rng().integers(0, 2**32, len(words), np.uint32)
            return super().mask(words, session)

    class Watched(Worker):
        """The process that trains, as its site sees it."""

        task: Task | None = None
        started = 0.0

        def give(self, task: Task, state: bytes | None, timeout: float) -> None:
            """Send a task, and note it."""
            self.task, self.started = task if task.kind == "visit" else None, time.monotonic()
            if self.task is not None:
                with suppress(OSError), (notes / f"{name}.visits").open("a") as stream:
                    stream.write(f"{task.round}\n")
            super().give(task, state, timeout)

        def receive(self) -> dict[str, Any]:
            """The result, or what this site says in its place."""
            fields = super().receive()
            task, pace = self.task, notes / f"{name}.pace"
            if task is not None and pace.exists():
                time.sleep(max(0.0, self.started + float(pace.read_text()) - time.monotonic()))
            if task is not None and (lie := LIES.get(lie_in(task.round))):
                upload = lie(decode_download(task.message), decode_upload(fields["message"]))
                fields["message"] = encode(upload)
            return fields

    with patch.multiple(site_module, Worker=Watched, Participant=Liar):
        app(["site", path])


if __name__ == "__main__":
    main()
