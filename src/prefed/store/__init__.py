"""A run's directory. A round is committed whole or not at all.

::

    config.toml                the experiment, every default filled in
    rounds.jsonl               one object per committed round
    summary.json, adapters/    after the last round
    checkpoint/COMMIT.json                          names the last committed round
    checkpoint/server@000012.safetensors            the server's state after that round
    checkpoint/clients/ward-7@000011.safetensors    a client's private state after its last visit

States are written beside the older versions under the round's number; replacing ``COMMIT.json`` is
the one step that makes them count, and only then are the older versions deleted. Whatever is newer
than the commit is what a killed process left behind: opening the store removes it.
"""

from prefed.store.reader import Commit, RunReader, StoreError, client_file, plain
from prefed.store.writer import RunWriter

__all__ = ["Commit", "RunReader", "RunWriter", "StoreError", "client_file", "plain"]
