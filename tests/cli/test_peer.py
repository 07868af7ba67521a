"""``prefed peer``, by torchrun and by hand."""

import json
import subprocess
import sys

import pytest

from prefed import Experiment, run
from prefed.core import Key
from prefed.models.tiny import make_tiny
from prefed.networks.peers.rendezvous import Place

FILE = """
rounds = 1
[data]
train = "pairs.jsonl"
partition = { by = "iid", clients = 2 }
[model]
name = "model"
lora.rank = 2
[method]
name = "decdpo"
batch_size = 4
local_steps = 1
[engine]
threads = 1
"""


@pytest.mark.rare
def test_torchrun_starts_peers(tmp_path):
    """The command of the documentation: a client for each rank. The loss of a round is the mean of its peers'
    losses."""
    path = tmp_path / "file.toml"
    path.write_text(FILE)
    records = [{"prompt": f"Is {k} odd?", "chosen": f" yes {k}", "rejected": f" no {k}"} for k in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    texts = [record["prompt"] + record["chosen"] for record in records]
    make_tiny(tmp_path / "model", texts, Key(0), layers=1, width=32, heads=2, vocabulary=280, steps=1)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "prefed", "peer"]
    words = [str(path), "--out", str(tmp_path / "peers"), "--auto-resume"]
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "peer 1: round 1/1  loss" in done.stdout
    run(Experiment.load(path), tmp_path / "run")
    folders = (tmp_path / "run", tmp_path / "peers/peer-0", tmp_path / "peers/peer-1")
    losses = [json.loads((folder / "rounds.jsonl").read_text())["loss"] for folder in folders]
    assert losses[0] == pytest.approx((losses[1] + losses[2]) / 2, abs=1e-6)
    got = json.loads((folders[1] / "summary.json").read_text())["origin"]["command"]
    assert got.startswith(f"prefed peer {path} --out ")


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({}, (None, None, None), "missing --rank and --peers and --at"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ("a:1", None, None), "--rank = 2: the ranks of 2 peers are 0"),
        ({}, ("mars", 0, 2), "missing --at|must be HOST:PORT"),
        ({}, ("mars:295000", 0, 2), "must be HOST:PORT with a port from 1 to 65535"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ("a:1", None, None), "--rank = 'one': must be a whole number"),
    ],
)
def test_a_place_that_is_not_whole_is_refused(environment, options, message):
    with pytest.raises(ValueError, match=message):
        Place.of(environment, *options)


def test_a_place_is_what_torchrun_says():
    """Under its agent the store is the agent's; a scheduler's names give peer 0's address."""
    names = {"RANK": "1", "WORLD_SIZE": "5", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
    agent = Place.of({**names, "TORCHELASTIC_USE_AGENT_STORE": "True"}, None, None, None)
    assert (agent.rank, agent.peers, agent.host) == (1, 5, "")
    alone = Place.of(names, None, 3, None)
    assert (alone.rank, alone.host, alone.port) == (3, "::1", 29500)
