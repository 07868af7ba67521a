"""How often each round was begun: what a round that is done again adds to what clients have given away."""

from __future__ import annotations

import json
from pathlib import Path

from prefed.core import files
from prefed.store.commit import StoreError


class BegunRounds:
    """Round → how often it was begun, in ``checkpoint/begun.json``.

    A round that was stopped is done again. If its noise is not drawn from the seed, its clients then send
    other noise on the same numbers, and an accountant must count both. The file is written before they are
    asked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, number: int) -> None:
        """Count one more beginning of a round; on return it is on the disk."""
        times = self.times()
        times[number] = times.get(number, 0) + 1
        content = {"begun": {str(key): value for key, value in sorted(times.items())}}
        files.write(self._path, json.dumps(content).encode(), mode=0o600)

    def times(self) -> dict[int, int]:
        """Round → how often; empty where nothing was counted.

        Raises:
            StoreError: the file is damaged.
        """
        if not self._path.exists():
            return {}
        try:
            begun = json.loads(self._path.read_bytes())["begun"]
            return {int(key): int(value) for key, value in begun.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{self._path} is damaged: {error}; without it nobody knows how often clients have answered: "
                "put a copy of it back, or start a new run with another --out"
            ) from error
