"""Whole runs on a device that is not the CPU; ``python tests/fake_gpu.py`` makes those of all methods."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "fake_gpu.py"


@pytest.mark.parametrize("case", ["kept, personal", pytest.param("moe, align@2", marks=pytest.mark.rare)])
def test_runs_on_a_device_that_refuses_operands_of_the_cpu_end_as_on_the_cpu(case):
    """FedPDPO with an optimiser's state between rounds: frozen model, LoRA, bottleneck, personal head and
    reward head. FedBis on a mixture of experts, a block on each of two devices: selectors, generated
    completions, and the policy that learns from them. Texts equal those on the CPU, and numbers do within
    1e-4, which the program checks."""
    path = os.pathsep.join([str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, PROGRAM, case],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [json.loads(line)[0] for line in done.stdout.splitlines() if line.startswith("[")] == [case]
