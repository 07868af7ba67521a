"""Whole runs on a device that is not the CPU; ``python tests/fake_gpu.py`` runs all methods."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "fake_gpu.py"


def test_runs_on_a_device_that_refuses_operands_of_the_cpu_end_as_on_the_cpu():
    """Frozen model, LoRA, bottleneck, personal head and reward head. Each of the server's numbers is the
    CPU's within 1e-4: other kernels round differently, and Adam divides by small numbers."""
    done = subprocess.run(
        [sys.executable, PROGRAM, "fedpdpo"],
        env=os.environ | {"PYTHONPATH": str(PROGRAM.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    far = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert far.keys() == {"fedpdpo"}
    assert max(far.values()) < 1e-4
