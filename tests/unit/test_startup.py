"""What needs no PyTorch does not import it: commands that only read or write an experiment file."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from prefed.core import Key
from prefed.data import synthetic
from prefed.methods import METHODS
from prefed.models.tiny import make_tiny

CLOSURE = {"prefed.run": 110, "prefed run": 137}
"""How a FedDPO run is started → how many files of prefed it may import."""
UNUSED = re.compile(
    r"prefed\.(align|networks|theory|privacy\.|ui\.collect|trackers\.(tools|tracking)"
    r"|(\w+\.)+(ppo|tastes|mixed_rewards|selector|graphs|mixing_matrices|simulated_fleet|neighbours|ray|processes"
    r"|stopping|offences|optimizers)\b|config\.errors|train\.metrics\.text"
    r"|ui\.pages\.(?!tables$|terminal$))"
)
"""Wings, and files of other methods, engines, pages and tables, and of errors."""
HEAVY = "{'torch', 'numpy', 'transformers', 'peft', 'datasets', 'matplotlib', 'scipy', 'pyarrow'}"
REPORT = f"""
import atexit, sys
atexit.register(lambda: print('loaded', *sorted({HEAVY} & set(sys.modules))))
"""
LOADS_OPENMP = """
import atexit, ctypes, os
from prefed.ui.cli import main

atexit.register(lambda: ctypes.CDLL(os.environ["LIBGOMP"]))
main()
"""
TYPO = """
[data]
train = "pairs.jsonl"
partition = { by = "iid", clients = 2 }
[model]
name = "model"
[method]
name = "fedpdpo"
learning_rate = 1e-4
"""
PLAIN = """
rounds = 1
data.train = "{place}/train.jsonl"
data.test = "{place}/test.jsonl"
data.partition = {{ by = "column", column = "client" }}
model.name = "{place}/model"
method.name = "feddpo"
"""
BOTH = """
import os, sys; os.chdir(sys.argv[1]); import prefed

def imported():
    print("imported", *sorted(name for name in sys.modules if name.partition(".")[0] == "prefed"))

prefed.run("plain.toml", "one")
imported()
sys.argv[1:] = ["run", "plain.toml", "--out", "other"]
from prefed.ui.cli import main
try:
    main()
finally:
    imported()
"""
FORKS = """
import os, sys; os.chdir(sys.argv.pop(1)); import prefed, prefed.core.text
from prefed.ui.cli import main
assert "pydantic" not in sys.modules
for number, command in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        for handle in (1, 2):
            os.dup2(os.open(f"{number}-{handle}", os.O_CREAT | os.O_WRONLY), handle)
        sys.argv[1:] = command.split()
        sys.exit(main())
    os.wait()
"""
COMMANDS = {
    **dict.fromkeys(("--help", "methods", "init fedpdpo", "sweep --help"), ""),
    **dict.fromkeys(("run typo.toml", "data typo.toml"), "typo.toml: method.learning_rate: no such key"),
    **dict.fromkeys(("sweep table.toml", "run table.toml --cell one"), "rows.one.txt: no such key"),
    "run none.toml": "none.toml: no such file",
    "collect": "give --model NAME",
    "demo --method fedpdo": "did you mean 'fedpdpo'?",
}
"""Command → what it says on standard error."""
TABLE = """
title = "A table"
[base]
method.name = "feddpo"
[rows.one]
txt = "One"
"""


def loaded(code, *arguments):
    """The last line of a program's output, which says what heavy libraries it loaded, and its errors."""
    words = [sys.executable, "-c", REPORT + code, *arguments]
    process = subprocess.run(words, capture_output=True, text=True)
    return process.stdout.splitlines()[-1], process.stderr


def test_commands_load_no_heavy_library(tmp_path, subtests):
    """Each in a process that has imported only the command line, as every command does."""
    (tmp_path / "typo.toml").write_text(TYPO)
    (tmp_path / "table.toml").write_text(TABLE)
    assert loaded(FORKS, tmp_path, *COMMANDS) == ("loaded", "")
    for number, (command, message) in enumerate(COMMANDS.items()):
        with subtests.test(command):
            output, errors = ((tmp_path / f"{number}-{handle}").read_text() for handle in (1, 2))
            assert (output.splitlines()[-1], message in errors) == ("loaded", True), errors


def test_settings_and_parts_of_methods_and_files_of_a_federation_need_no_heavy_library():
    code = """
import prefed, prefed.core, prefed.merge, prefed.train.losses
import prefed.networks.federation.config, prefed.networks.federation.flare.kits
from prefed.methods import METHODS
for name in METHODS:
    prefed.Experiment.model_validate({
        "data": {"train": "x.jsonl", "partition": {"by": "iid", "clients": 2}},
        "model": {"name": "m"}, "method": {"name": name}, "merge": {"rule": "median"},
    })
"""
    assert loaded(code) == ("loaded", "")


def test_what_is_imported_later_is_the_library_itself():
    import torch

    from prefed.core import lazy

    assert lazy.torch.Tensor is torch.Tensor
    assert lazy.F.logsigmoid is torch.nn.functional.logsigmoid
    with pytest.raises(AttributeError, match="tensors"):
        _ = lazy.torch.tensors


@pytest.mark.parametrize("package", ["prefed", "prefed.core", "prefed.data", "prefed.models"])
def test_a_package_hands_out_all_its_names_and_no_other(package):
    from importlib import import_module

    module = import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize(
    ("environment", "counts"),
    [
        ({}, {"30000", "0"}),
        ({"GOMP_SPINCOUNT": "777"}, {"777"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"30000000000"}),
    ],
)
def test_threads_that_wait_sleep_soon(environment, counts):
    """``OMP_DISPLAY_ENV`` makes the OpenMP that PyTorch brings say what it goes by: how often a thread looks
    before it sleeps. It is 300,000 times if nothing is set; a policy alone makes it none or 30 thousand
    million times (libgomp's manual, GOMP_SPINCOUNT). Which of two is the default: what else runs. That
    library alone is loaded here, when the command ends: the tests above see that the command line does not
    load PyTorch first."""
    places = find_spec("torch").submodule_search_locations
    brought = [str(file) for place in places for file in Path(place).glob("lib/libgomp*")]
    if not brought:
        pytest.skip("this PyTorch has another OpenMP than GNU's")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    process = subprocess.run(
        [sys.executable, "-c", LOADS_OPENMP, "--version"],
        env={**own, **environment, "OMP_DISPLAY_ENV": "VERBOSE", "LIBGOMP": brought[0]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert any(f"GOMP_SPINCOUNT = '{count}'" in process.stderr for count in counts)


def test_an_import_sets_no_environment_variable():
    """A program that imports prefed decides itself how its threads wait. Pages need neither Matplotlib nor
    transformers."""
    code = """
import os, sys
before = dict(os.environ)
import prefed
from prefed import Experiment, run, load_run, read_run
import prefed.ui.pages.page
assert dict(os.environ) == before, set(os.environ) ^ set(before)
assert not {"matplotlib", "transformers"} & set(sys.modules)
"""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    subprocess.run([sys.executable, "-c", code], env=own, check=True)


def test_a_plain_run_imports_what_it_needs_only(tmp_path):
    """The command imports what the function does, and more, so it is called after it."""
    place = tmp_path / "place"
    synthetic.write(place, synthetic.generate(Key(5), clients=2, train=8, test=4))
    make_tiny(place / "model", synthetic.corpus(Key(5), 20), Key(5), layers=1, width=16, heads=2, steps=1)
    (tmp_path / "plain.toml").write_text(PLAIN.format(place=place))
    lines = subprocess.check_output([sys.executable, "-c", BOTH, tmp_path], text=True).splitlines()
    found = [line.split()[1:] for line in lines if line.startswith("imported ")]
    for (start, most), imported in zip(CLOSURE.items(), found, strict=True):
        assert [name for name in imported if UNUSED.match(name)] == []
        assert set(imported) & {f"prefed.methods.{name}" for name in METHODS} == {"prefed.methods.feddpo"}
        assert len(imported) <= most, f"{start}: {len(imported)} files of prefed: {' '.join(imported)}"
    assert all((tmp_path / name / "summary.json").exists() for name in ("one", "other"))
