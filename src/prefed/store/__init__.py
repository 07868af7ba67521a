"""Run directories. Rounds are committed atomically.

::

    config.toml                the experiment with all defaults
    rounds.jsonl               one object per committed round
    summary.json, adapters/    after the last round
    checkpoint/COMMIT.json                          refers to the last committed round
    checkpoint/server@000012.safetensors            the server's state after that round
    checkpoint/clients/ward-7@000011.safetensors    a client's private state after its last visit

States are written next to the older versions under the round's number. Replacing ``COMMIT.json`` commits
them, and only then are older versions deleted. Files that are newer than the commit were left by a killed
process and are removed when the directory is opened for writing.
"""

from prefed.store.commit import CheckpointConfig, Commit, StoreError
from prefed.store.reader import RunReader, plain
from prefed.store.states import ClientStateFiles, NodeFile, NodeStates, client_file
from prefed.store.writer import RunWriter

__all__ = [
    "CheckpointConfig",
    "ClientStateFiles",
    "Commit",
    "NodeFile",
    "NodeStates",
    "RunReader",
    "RunWriter",
    "StoreError",
    "client_file",
    "plain",
]
