"""Late uploads as steps: what a client learned from an older model, made from the newest one.

A server that averages late models takes its own model back towards older ones. FedBuff (arXiv:2106.06639,
algorithm 1) adds up the clients' steps instead::

    θ ← θ + (1/K) Σ_i s(q_i) (θ_i − θ^{start_i})
"""

from __future__ import annotations

from dataclasses import replace

from prefed.core import State, Tensors, Upload


def from_newest(upload: Upload, start: State, newest: State) -> Upload:
    """``upload`` with θ + (θ_i − θ^start) in place of each group θ_i.

    Args:
        start: the server's state that the client started from.
        newest: the server's state now; it has the groups that ``start`` has.

    >>> import torch
    >>> from prefed.core import Entry, Layout
    >>> def state(x): return State({"model": Tensors(Layout((Entry("a", (1,), "lora"),)), torch.tensor([x]))})
    >>> sent = Upload("ward-7", 3, state(2.5).tensors)
    >>> from_newest(sent, state(2.0), state(7.0)).tensors["model"].flat
    tensor([7.5000])
    """
    groups = {}
    for name, value in upload.tensors.items():
        before, after = (state.tensors[name].select(value).flat.double() for state in (start, newest))
        groups[name] = Tensors(value.layout, (after + (value.flat.double() - before)).to(value.flat.dtype))
    return replace(upload, tensors=groups)


def shorten(current: Tensors, value: Tensors, factor: float) -> Tensors:
    """``current`` moved by ``factor`` of the way to ``value``; with 1 that is ``value`` to the bit."""
    return value if factor == 1 else current + (value - current) * factor
