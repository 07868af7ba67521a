"""A run's directory. A round is committed whole or not at all.

::

    config.toml                the experiment, every default filled in
    rounds.jsonl               one object per committed round
    summary.json, adapters/    after the last round
    checkpoint/COMMIT.json                          names the last committed round
    checkpoint/server@000012.safetensors            the server's state after that round
    checkpoint/clients/ward-7@000011.safetensors    a client's private state after its last visit

States are written beside the older versions under the round's number. Replacing ``COMMIT.json`` is the one
step that makes them count, and only then are the older versions deleted. A file that is newer than the commit
was left by a process that was killed: opening the directory for writing removes it.
"""

from prefed.store.commit import Commit, StoreError, client_file
from prefed.store.reader import RunReader, plain
from prefed.store.states import ClientStateFiles, NodeFile, NodeStates
from prefed.store.writer import RunWriter

__all__ = [
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
