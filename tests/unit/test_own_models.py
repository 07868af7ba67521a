"""Models of a client's own under FedEx-LoRA, whose residual the server changes after every visit."""

from __future__ import annotations

import pytest

from prefed.core import Tensors
from prefed.merge import Aggregator, MergeConfig, lora
from prefed.methods import METHODS
from prefed.testing import crowd, initial, simulate


@pytest.mark.parametrize(("name", "visit"), [("fedamp", -1), ("pfedme", -1), ("ditto", 0)])
def test_a_model_of_ones_own_keeps_the_residual_it_was_trained_on(name: str, visit: int) -> None:
    """The factors A_i, B_i were fitted with the residual of a download; the residual that the
    merge makes afterwards belongs to the mean of the factors. Ditto's own model starts from the first
    download and never leaves it; FedAMP's and pFedMe's start anew from each."""
    kind = METHODS[name]
    start = initial(kind.needs(kind.Settings()) | lora.needs("fedex"))
    aggregator = Aggregator(MergeConfig(lora="fedex"), start.layout, 2.0)
    method = kind.build(kind.Settings(lr=0.1), start.layout, aggregator, 3)
    clients = crowd(2, start.layout.size)
    outcome = simulate(method, clients, start, 3)
    residuals = [n for n in start if n.startswith("residual/")]
    received = [download.tensors["model"] for download in outcome.downloads[::2]]
    for client, model in outcome.models(method, clients, start).items():
        if client == "client-0":
            _equal(model, received[visit], residuals)
    last = outcome.server.tensors["model"]
    assert any(not last[n].equal(received[visit][n]) for n in residuals)


def _equal(model: Tensors, other: Tensors, names: list[str]) -> None:
    assert names
    assert all(model[name].equal(other[name]) for name in names)
