"""A Ray cluster of two nodes on this machine, for tests; they are skipped where Ray is not installed."""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from waiting import until

TESTS = Path(__file__).resolve().parent


class TwoNodes:
    """The head has one CPU, the other node two: three actors of one thread lie on both.

    Attributes:
        address: of the head.
        other: the process that started the other node, and is the parent of all its processes.
    """

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self.head = _start("--head", f"--port={port}", "--num-cpus=1", "--include-dashboard=false")
        self.address = f"{_own_address()}:{port}"
        until(lambda: self._reachable(port), "the head answers")
        self.add_node()

    def add_node(self) -> None:
        """Start the other node."""
        self.other = _start(f"--address={self.address}", "--num-cpus=2")

    def kill_node(self) -> None:
        """Kill every process of the other node at once, as a machine that loses its power."""
        processes = [psutil.Process(self.other.pid), *psutil.Process(self.other.pid).children(recursive=True)]
        for process in processes:
            process.kill()
        self.other.wait()

    def actors(self) -> list[int]:
        """The processes of the actors of both nodes that have started tasks."""
        nodes = (psutil.Process(node.pid) for node in (self.head, self.other))
        processes = (process for node in nodes for process in node.children(recursive=True))
        return [process.pid for process in processes if "JobActor" in " ".join(_words(process))]

    def stop(self) -> None:
        """End both nodes."""
        for node in (self.other, self.head):
            for process in psutil.Process(node.pid).children(recursive=True):
                process.kill()
            node.kill()
            node.wait()

    def _reachable(self, port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((_own_address(), port)) == 0


@cache
def two_nodes() -> TwoNodes:
    """The cluster, which this process has joined; it lives as long as the process."""
    if find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'prefed[ray]'")
    os.environ |= {  # Ray reads them when it is imported
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    import ray

    nodes = TwoNodes()
    atexit.register(nodes.stop)
    ray.init(nodes.address, logging_level="ERROR", log_to_driver=False)
    atexit.register(ray.shutdown)
    wait_for_nodes(2)
    return nodes


def wait_for_nodes(count: int) -> None:
    """Until the cluster has so many living nodes."""
    import ray

    until(lambda: sum(node["Alive"] for node in ray.nodes()) == count, f"{count} nodes live")


def _start(*options: str) -> subprocess.Popen[bytes]:
    program = Path(sys.executable).with_name("ray")
    command = [str(program), "start", "--block", "--disable-usage-stats", *options]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, **quiet)


def _own_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
