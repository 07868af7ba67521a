"""A GPU in Python: its tensors compute on the CPU, and refuse operands that are elsewhere, as CUDA's do.

Numbers are real, so a run can be compared with one on the CPU. Kernels of a GPU (flash attention, products of
16 bits with a sum in 32) are not run. As a program it runs methods on both devices, and prints how far apart
the server's tensors are:

    python tests/fake_gpu.py feddpo fedvpa

It needs a process of its own, since PyTorch counts devices at the first backward pass.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class _Random(_DummyBackendModule):
    """Dropout of the device draws from the CPU's generator."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        pass


# Before the first backward pass of the process, which counts the devices.
_setup_privateuseone_for_python_backend("fake_gpu", backend_module=_Random())

DEVICE = torch.device("fake_gpu", 0)
_aten = torch.ops.aten
_CROSSING = {
    *(_aten.copy_.default, _aten._to_copy.default),
    *(_aten.to.device, _aten.to.dtype, _aten.to.dtype_layout),
}
"""Operations whose operands may be on two devices."""


class OnGpu(torch.Tensor):
    """A tensor of the fake GPU; ``inner`` holds its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    leaves = tree_leaves((args, dict(kwargs)))
    on = [leaf for leaf in leaves if isinstance(leaf, OnGpu)]
    off = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, OnGpu)]
    if on and func not in _CROSSING and any(each.dim() for each in off):
        raise RuntimeError(f"{func} has operands on two devices: {[tuple(t.shape) for t in (*on, *off)]}")
    if on and func is _aten._fused_sdp_choice.default:
        return 0  # attention without a kernel of the device
    named = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    to_gpu = named[0].type == DEVICE.type if named else bool(on)
    if func is _aten.copy_.default:
        to_gpu = isinstance(args[0], OnGpu)
    there = tree_map_only(torch.device, lambda device: torch.device("cpu"), (args, dict(kwargs)))
    args, kwargs = tree_map_only(OnGpu, lambda tensor: tensor.inner, there)
    known = {id(each.inner): each for each in on}

    def placed(result: torch.Tensor) -> torch.Tensor:
        if to_gpu and id(result) in known:
            return known[id(result)]  # in place
        if to_gpu:
            return OnGpu(result.clone() if any(result is each for each in off) else result)
        return result.clone() if id(result) in known else result

    return tree_map_only(torch.Tensor, placed, func(*args, **kwargs))


def _empty_strided(size: Any, stride: Any, **options: Any) -> torch.Tensor:
    """For constructors in C++, which pass by the mode."""
    return OnGpu(torch.empty_strided(size, stride, dtype=options.get("dtype")))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    source, result = (each.inner if isinstance(each, OnGpu) else each for each in (source, target))
    result.copy_(source)
    return target


_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")


class _Mode(TorchDispatchMode):
    """Makes tensors on the fake GPU for calls that name it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Generator(torch.Generator):
    """On the CPU, whatever the device."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls, "cpu")


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Let prefed find the fake GPU as its device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefed.models.backbone.find_device", lambda name: DEVICE)
        patch.setattr(torch, "Generator", _Generator)
        # Views of a wrapped tensor cannot be inference tensors.
        patch.setattr(torch, "inference_mode", torch.no_grad)
        with _Mode():
            yield


def apart(folder: Path, method: str) -> float:
    """The largest difference between the server's tensors, and losses, of a run on either device."""
    from finished import small_experiment
    from prefed import Experiment, run

    tables = small_experiment(folder, rounds=1)
    tables["method"] |= {"name": method, "local_steps": 1}
    experiment = Experiment.model_validate(tables)
    on_cpu = run(experiment, folder / f"{method}-cpu")
    with fake_gpu():
        on_gpu = run(experiment, folder / f"{method}-gpu")
    losses = [result.rounds[-1]["loss"] for result in (on_cpu, on_gpu)]
    tensors = on_cpu.server.tensors.items()
    far = [float((on_gpu.server.tensors[name].flat - each.flat).abs().max()) for name, each in tensors]
    return max([abs(losses[0] - losses[1]), *far])


def main() -> None:
    """Run the methods that are named, or all."""
    from finished import small_place
    from prefed.methods import METHODS

    torch.set_num_threads(1)
    with fake_gpu(), pytest.raises(RuntimeError, match="two devices"):
        torch.ones(2, device=DEVICE) + torch.ones(2)
    with TemporaryDirectory() as name:
        folder = small_place(Path(name))
        for method in sys.argv[1:] or METHODS:
            print(json.dumps([method, apart(folder, method)]), flush=True)


if __name__ == "__main__":
    main()
