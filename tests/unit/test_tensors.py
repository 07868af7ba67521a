"""Named tensors over one buffer, and several mappings seen as one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefed.core import Entry, Layout, Tensors
from prefed.core.tensors import Layered

LAYOUT = Layout(
    tuple(Entry(name, shape, "p") for name, shape in zip("abcd", [(2,), (1, 3), (2, 2), (1,)], strict=True))
)
NAMES = st.sets(st.sampled_from("abcd"))


def filled(names, value):
    layout = LAYOUT.select(names)
    return Tensors(layout, value + torch.arange(layout.size, dtype=torch.float32))


@given(NAMES, NAMES, NAMES)
def test_layers_have_the_values_of_their_copy(first, second, chosen):
    """Twin: :meth:`Tensors.replace`, which copies."""
    base, layers = filled("abcd", 0.0), [filled(first, 100.0), filled(second, 200.0)]
    ours, theirs = Layered(LAYOUT, base, *layers), base.replace(*layers)
    assert ours.equal(theirs)
    assert ours.clone().equal(theirs)
    assert ours.select(chosen).equal(theirs.select(chosen))
    assert base.replace(ours).equal(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in LAYOUT.names)
    into = torch.zeros(LAYOUT.size)
    ours.copy_to(into)
    assert torch.equal(into, theirs.flat)


def test_layers_convert_and_do_not_copy():
    """A frozen head in bfloat16 is read in float32. One layer's tensors are views of it."""
    head = torch.tensor([[1.5, -2.0, 0.25]], dtype=torch.bfloat16)
    base = filled("acd", 0.0)
    layered = Layered(LAYOUT, base, {"b": head})
    assert layered["b"].tolist() == [[1.5, -2.0, 0.25]]
    assert (layered.dtype, layered["b"].dtype, layered.flat.dtype) == (torch.float32,) * 3
    assert layered.select("cd").flat.untyped_storage().data_ptr() == base.flat.untyped_storage().data_ptr()


def test_layers_name_every_tensor():
    with pytest.raises(ValueError, match="no layer has the tensors c, d"):
        Layered(LAYOUT, filled("ab", 0.0))
    with pytest.raises(KeyError):
        Layered(LAYOUT.select("ab"), filled("abcd", 0.0))["c"]
