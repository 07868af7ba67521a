"""Worker processes that die, hang, lose their parent or start where they should not."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import toy
from prefed import Experiment, run
from prefed.core import Callback
from prefed.engines import BackendSettings, InProcess, JobFactory, WorkerError, WorkerProcesses
from prefed.engines.backends import peak_memory_mb, worker_pool
from prefed.runs.build import job_factory
from waiting import WATCHDOG

FORKED = pytest.mark.usefixtures("forked_workers")

TESTS = Path(__file__).resolve().parents[1]

RUN = """
import sys
from pathlib import Path
sys.path.append({tests!r})
import toy
changes = {changes!r}
print("here", flush=True)
toy.run(Path({out!r}), backend="processes", **changes)
"""
"""A script as users write them: without a guard for its main part."""

PRESENT = """
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
for frame in (b'{"state": false, "memory_mb": 0}', b""):
    pipe.recv_bytes()
    pipe.send_bytes(frame)
sys.stdin.read()
"""
"""What a worker process begins with, without a job: it takes its first message and answers."""


def workers(count, timeout=0.0, builder="toy:build", **changes):
    factory = JobFactory(builder, toy.text(**changes))
    return lambda job, states: WorkerProcesses(factory, states, BackendSettings(count, timeout=timeout))


def script(folder, cwd, **changes):
    """A run of the toy with a worker by a program in ``folder``, started in ``cwd``."""
    for place in (folder, cwd):
        place.mkdir(exist_ok=True)
    path = folder / "program.py"
    path.write_text(RUN.format(tests=str(TESTS), changes=changes, out=str(folder / "run")))
    return subprocess.Popen([sys.executable, path], cwd=cwd, stdout=subprocess.PIPE, text=True)


@FORKED
def test_a_workers_death_is_named_and_the_run_resumes(tmp_path):
    """Each worker that tries is killed, as by the kernel out of memory: three, no more. Without the fault the
    run continues and ends as an undisturbed one."""
    faults = {"Client 4/ü": "die"}
    with pytest.raises(WorkerError, match=r"'Client 4/ü' .*killed by SIGKILL; giving up after 3 "):
        toy.run(tmp_path / "run", backend=workers(1, faults=faults))
    toy.run(tmp_path / "run", resume=True)
    toy.run(tmp_path / "whole")
    assert toy.outcome(tmp_path / "run") == toy.outcome(tmp_path / "whole")


@FORKED
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_task_of_a_lost_worker_is_done_again(tmp_path, caplog, number):
    """One of two workers is killed, or stopped as by a debugger, after the third task. Its task is another's,
    and the run ends as an undisturbed one."""
    made, hit = [], []

    def make(job, states):
        made.append(workers(2, timeout=0 if number == signal.SIGKILL else 5)(job, states))
        return made[0]

    class Hits(Callback):
        def on_task_end(self, what, done, of):
            if done == 3 and not hit:
                hit.append((made[0]._busy + made[0]._idle)[0]._process.pid)
                os.kill(hit[0], number)

    toy.run(tmp_path / "there", backend=make, callback=Hits())
    toy.run(tmp_path / "here")
    assert hit
    # A time-out may meet another visit too, if the machine is busy.
    assert caplog.text.count("retrying in another worker") >= 1
    assert toy.outcome(tmp_path / "here") == toy.outcome(tmp_path / "there")


@FORKED
def test_a_workers_exception_arrives_with_its_place(tmp_path):
    """A client is asked whose data the workers' builder does not have."""
    place = r"KeyError: 'Client 5/ü'\n\(client 'Client 5/ü', round 1, train\)"
    with pytest.raises(WorkerError, match=place):
        toy.run(tmp_path / "run", cohort=6, backend=workers(1, clients=5, cohort=5))


@FORKED
def test_a_worker_that_is_killed_while_it_answers(tmp_path, monkeypatch):
    """The answer's frame announces more bytes than come before SIGKILL does."""
    monkeypatch.setattr(worker_pool, "ATTEMPTS", 1)
    (tmp_path / "torn.py").write_text(
        "import os, signal, struct, toy\n"
        "from prefed.engines.backends import processes as worker\n"
        "whole = worker._send\n"
        "def torn(pipe, **fields):\n"
        "    if 'client' not in fields:\n"
        "        return whole(pipe, **fields)\n"
        "    os.write(pipe.fileno(), struct.pack('!i', 1000) + b'{')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def build(text):\n"
        "    worker._send = torn\n"
        "    return toy.build(text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerError, match=r"the visit of client .*killed by SIGKILL.* ran out"):
        toy.run(tmp_path / "run", backend=workers(1, builder="torn:build"))
    toy.run(tmp_path / "run", resume=True)
    toy.run(tmp_path / "whole")
    assert toy.outcome(tmp_path / "run") == toy.outcome(tmp_path / "whole")


@FORKED
@pytest.mark.parametrize("fault", ["hang", "stop"])
def test_a_worker_that_hangs_is_ended_and_the_run_resumes(tmp_path, monkeypatch, fault):
    """Computing for ever, or stopped as by a debugger: the client is named, and the run can be resumed. All
    clients hang, so that on a busy machine no other visit is the first to take longer."""
    monkeypatch.setattr(worker_pool, "ATTEMPTS", 1)
    faults = {f"Client {number}/ü": fault for number in range(6)}
    late = r"visit of client '(.*)' exceeded \[engine\] visit_timeout = 2 seconds.*resume"
    with pytest.raises(WorkerError, match=late) as caught:
        toy.run(tmp_path / "run", backend=workers(1, timeout=2, faults=faults))
    job = toy.build(toy.text())
    assert re.search(late, str(caught.value))[1] in job.members
    toy.run(tmp_path / "run", resume=True)
    toy.run(tmp_path / "whole")
    assert toy.outcome(tmp_path / "run") == toy.outcome(tmp_path / "whole")


def test_workers_run_nothing_of_the_working_directory_and_end_with_their_parent(tmp_path):
    """Modules that would be found first in the working directory end a process that imports them; the program
    prints "here" once, although it has no guard. It is killed during a visit that never ends. Workers hold
    the other end of its standard output, which reads to its end only when they are gone too."""
    cwd = tmp_path / "b"
    cwd.mkdir()
    for name in ("json", "torch", "typing", "subprocess", "pathlib", "prefed", "toy", "signal"):
        (cwd / f"{name}.py").write_text("import os\nos._exit(99)\n")
    process = script(tmp_path / "a", cwd, faults={f"Client {number}/ü": "hang" for number in range(6)})
    assert [process.stdout.readline() for _ in range(2)] == ["here\n", "hanging\n"]
    process.kill()
    rest, _ = process.communicate(timeout=WATCHDOG)
    assert set(rest.split()) <= {"hanging"}


def test_modules_are_found_where_the_parent_finds_them(tmp_path, monkeypatch):
    """A path is handed on in full, the working directory only if its full path is there."""
    from prefed.engines.backends.processes import _import_path

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", "lib", "/usr/lib/x"])
    assert _import_path() == [str(tmp_path / "lib"), "/usr/lib/x"]
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    assert _import_path() == [str(tmp_path)]


@pytest.mark.parametrize("named", [None, "3,GPU-5a,7"])
def test_each_worker_has_a_device_of_its_own(monkeypatch, named):
    """Of three devices, four workers take each once and the first twice; a worker that takes the place of
    another takes its device. What this process does not see is given to nobody. The processes are real, and
    do nothing but say that they are there."""
    monkeypatch.setattr("prefed.engines.backends.processes.START", PRESENT)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    devices = named.split(",") if named else ["0", "1", "2"]
    with workers(4)(None, None) as backend:
        started = sorted(backend._idle, key=lambda worker: worker._process.pid)

        def seen(worker):
            # Until it executes a process has its parent's environment, then for an instant none.
            process = Path(f"/proc/{worker._process.pid}")
            before, own = Path("/proc/self/environ").read_bytes(), b""
            while not own or own == before or own[-1:] != b"\0":
                time.sleep(0.01)
                own = (process / "environ").read_bytes()
            return dict(line.split(b"=", 1) for line in own.split(b"\0") if line)[
                b"CUDA_VISIBLE_DEVICES"
            ].decode()

        assert [seen(worker) for worker in started] == [*devices, devices[0]]
        backend._idle.remove(started[1])
        backend._lose(started[1], "is ended by this test")
        (other,) = backend._busy
        assert seen(other) == devices[1]


def test_workers_take_turns_over_named_devices(monkeypatch):
    """Of four devices that this process sees the settings name two, by their places among these four."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5a,7,8")
    settings = BackendSettings(3, devices=("cuda:2", "cuda:1"))
    backend = WorkerProcesses(JobFactory("toy:build", ""), None, settings)
    for _ in range(3):
        backend._idle.append(SimpleNamespace(device=backend._device()))
    assert [worker.device for worker in backend._idle] == ["7", "GPU-5a", "7"]


def test_workers_with_two_devices_each_take_turns_over_pairs_of_them(monkeypatch):
    """Of five devices the fifth has no partner."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    backend = WorkerProcesses(JobFactory("toy:build", ""), None, BackendSettings(3, gpus=2))
    for _ in range(3):
        backend._idle.append(SimpleNamespace(device=backend._device()))
    assert [worker.device for worker in backend._idle] == ["0,1", "2,3", "0,1"]


ON_TWO_GPUS = Experiment.model_validate(
    {
        "data": {"train": "nowhere.jsonl", "partition": {"by": "iid", "clients": 2}},
        "model": {"name": "nothing"},
        "method": "feddpo",
        "engine": {"workers": 2, "devices": ["cuda:1", "cuda:2"]},
    }
)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (2, "'cuda:2' does not exist; CUDA devices .*: cuda:0, cuda:1"),
        (0, "'cuda:1' does not exist; CUDA devices .*: none"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(monkeypatch, tmp_path, count, words):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    with pytest.raises(WorkerError, match=words):
        run(ON_TWO_GPUS, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_worker_gets_no_devices_that_it_does_not_see(tmp_path):
    """It sees one alone, which is its cuda:0."""
    text = json.loads(job_factory(ON_TWO_GPUS, tmp_path).text)["experiment"]
    assert "workers = 2" in text
    assert "devices" not in text


def test_the_memory_of_workers():
    """The two's sum, each no less than an interpreter with torch; what this process held when it started them
    is none of theirs. Oracle: what the system says of each."""
    ballast = bytearray(2**28)
    ballast[:] = b"x" * len(ballast)
    with workers(2)(None, None) as backend:
        held = [Path(f"/proc/{worker._process.pid}/status").read_text() for worker in backend._idle]
        each = [int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 2**10 for status in held]
        assert backend.memory_mb() == pytest.approx(sum(each), rel=0.05)
    assert 50 < min(each) <= max(each) < peak_memory_mb() - 256


def test_the_memory_of_a_run_counts_its_workers(tmp_path):
    """The workers' peak of a million MiB, and this process' own on top, below 100,000."""

    class Large(InProcess):
        def memory_mb(self):
            return 1e6

    toy.run(tmp_path / "run", backend=Large)
    totals = json.loads((tmp_path / "run/checkpoint/COMMIT.json").read_text())["totals"]
    assert 1e6 < totals["peak_memory_mb"] < 1.1e6
