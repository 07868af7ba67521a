"""Messages as bytes."""

import contextlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefed.core import Download, Entry, Layout, State, Tensors, Upload, wire
from prefed.core.wire import WireError, decode_download, decode_state, decode_upload, encode, upload_limits

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def tensor_groups(draw):
    groups = {}
    for name in draw(
        st.lists(st.text(min_size=1).filter(lambda n: n != "__metadata__"), max_size=3, unique=True)
    ):
        names = draw(st.lists(st.text(), max_size=3, unique=True))
        entries = tuple(
            Entry(
                n,
                tuple(draw(st.lists(st.integers(0, 3), max_size=3))),
                draw(st.text()),
                draw(st.none() | st.integers(0, 9)),
                draw(st.sampled_from([None, "A", "B"])),
            )
            for n in names
        )
        layout = Layout(entries)
        flat = torch.randn(layout.size, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
        groups[name] = Tensors(layout, (flat * 100).to(draw(st.sampled_from(DTYPES))))
    return groups


def same(left, right):
    assert list(left) == list(right)
    for name in left:
        assert left[name].equal(right[name])
        assert left[name].layout == right[name].layout


@given(tensor_groups(), st.dictionaries(st.text(), PLAIN, max_size=3))
def test_a_state_comes_back_as_it_was(groups, values):
    """Law: decode ∘ encode is the identity, over names in any script, all dtypes, empty tensors."""
    back = decode_state(encode(State(groups, values)))
    same(back.tensors, groups)
    assert repr(dict(back.values)) == repr(values)  # distinguishes 1 from 1.0 and 0.0 from -0.0


@given(tensor_groups(), st.dictionaries(st.text(), st.floats(), max_size=3), st.text())
def test_messages_come_back_as_they_were(groups, scalars, client):
    down = decode_download(encode(Download(groups, scalars)))
    same(down.tensors, groups)
    assert repr(dict(down.scalars)) == repr(scalars)
    up = decode_upload(encode(Upload(client, 7.0, groups, scalars, 3)))
    same(up.tensors, groups)
    assert (up.client, up.weight, up.sent_at) == (client, 7.0, 3)
    assert repr(dict(up.scalars)) == repr(scalars)


@given(tensor_groups())
def test_equal_messages_are_equal_bytes(groups):
    copies = {name: tensors.clone() for name, tensors in groups.items()}
    assert encode(Download(groups)) == encode(Download(copies))


def model(values=(1.0, 2.0, 3.0)):
    return Tensors(Layout((Entry("lora/0/A", (len(values),), "lora", 0, "A"),)), torch.tensor(values))


def test_groups_may_share_memory():
    whole = model()
    back = decode_state(encode(State({"a": whole, "b": whole, "c": Tensors(whole.layout, whole.flat)})))
    assert all(group.equal(whole) for group in back.tensors.values())


def test_a_view_carries_only_its_own_elements():
    """A selection that is a view of a client's whole buffer takes none of the rest along."""
    layout = Layout((Entry("lora", (2,), "lora"), Entry("head", (2,), "head")))
    whole = Tensors(layout, torch.tensor([1.0, 2.0, 1234.5678, 1234.5678]))
    data = encode(Upload("c", 1.0, {"model": whole.select(["lora"])}))
    assert torch.tensor(1234.5678).numpy().tobytes() not in data
    assert b"head" not in data


def test_kept_in_bfloat16_a_state_is_rounded_and_halved():
    """bfloat16 keeps 8 significant bits: 1 + 2^-9 rounds to 1; 1.5 is exact. It comes back in fp32."""
    tensors = model([1 + 2**-9, 1.5] * 1000)
    full, half = encode(State({"m": tensors})), encode(State({"m": tensors}), torch.bfloat16)
    assert len(full) - len(half) == 2000 * 2
    back = decode_state(half).tensors["m"]
    assert back.flat.dtype == torch.float32
    assert back.flat[:2].tolist() == [1.0, 1.5]


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}, {"a": {2.5}}, b"x", torch.tensor(1.0), [object()]])
def test_what_json_would_change_is_refused(value):
    with pytest.raises(WireError, match=r"state.values.x"):
        encode(State({}, {"x": value}))


@given(st.binary(max_size=200))
def test_noise_is_no_message(noise):
    for decode in (decode_state, decode_download, decode_upload):
        with pytest.raises(WireError):
            decode(noise)


@given(st.data())
def test_damage_never_gives_another_error(data):
    """A flipped byte either changes values or is refused as a WireError: nothing else escapes."""
    whole = bytearray(encode(Upload("c", 2.0, {"model": model()}, {"loss": 0.5}, 1)))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(WireError):
        assert isinstance(decode_upload(bytes(whole)), Upload)
    with pytest.raises(WireError):
        decode_upload(bytes(whole[: data.draw(st.integers(0, len(whole) - 1))]))


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ('"groups":', '"groups":' + "[" * 200_000),  # deeper than a parser's stack
        ("[3]", "[Infinity]"),
        ("[3]", f"[{'9' * 400}]"),  # beyond every float, and every tensor
        ('"weight":2.0', f'"weight":{"9" * 5000}'),
        ('"loss":0.5', '"loss":true'),
    ],
)
def test_a_hostile_header_is_no_message(text, instead):
    """What JSON allows and no message has: each is refused as a WireError, as any damage is."""
    whole = encode(Upload("c", 2.0, {"model": model()}, {"loss": 0.5}, 1))
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    assert text in header["__metadata__"]["prefed"]
    header["__metadata__"]["prefed"] = header["__metadata__"]["prefed"].replace(text, instead)
    forged = json.dumps(header).encode()
    with pytest.raises(WireError):
        decode_upload(len(forged).to_bytes(8, "little") + forged + whole[8 + length :])


def test_a_shape_that_no_tensor_has_is_no_message():
    """No element at all, and strides beyond 64 bits: safetensors lets it pass, and PyTorch does not."""
    whole = encode(Upload("c", 2.0, {"model": Tensors.empty()}))
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["model"]["shape"] = [0, 2**40, 2**40]
    forged = json.dumps(header).encode()
    with pytest.raises(WireError):
        decode_upload(len(forged).to_bytes(8, "little") + forged + whole[8 + length :])


@given(tensor_groups(), st.dictionaries(st.text(), st.floats(), max_size=3), st.text(), st.integers(0, 9**9))
def test_a_message_is_within_its_limits(groups, scalars, client, number):
    """Whatever the names and numbers, and by no more than 2 kB and what each number and group may need."""
    floats = {name: Tensors(t.layout, t.flat.double()) for name, t in groups.items()}
    data = encode(Upload(client, -1.2345678901234567e-300, floats, scalars, number))
    layouts = {name: tensors.layout for name, tensors in floats.items()}
    header, whole = upload_limits(client, layouts, torch.float64, scalars)
    assert int.from_bytes(data[:8], "little") <= header
    assert len(data) <= whole <= len(data) + 2048 + 64 * len(scalars) + 256 * len(groups)
    assert decode_upload(data, (header, whole)).client == client


def test_a_message_too_large_is_refused_unread():
    """Both sizes are reported. Nothing in it is read: what follows its first 8 bytes is noise."""
    with pytest.raises(WireError, match="the message has 1,000,008 bytes; expected at most 900"):
        decode_upload(bytes(8) + b"x" * 10**6, (100, 900))
    with pytest.raises(WireError, match="the message has 101 bytes of header; expected at most 100"):
        decode_upload((101).to_bytes(8, "little") + b"x" * 500, (100, 900))


def test_layouts_of_uploads_are_not_remembered():
    """They come from outside: each header of a megabyte would stay in memory."""
    before = wire._layout.cache_info()
    layout = Layout(tuple(Entry(f"t{k}", (1,), "lora") for k in range(5)))
    decode_upload(encode(Upload("c", 1.0, {"model": Tensors.zeros(layout)})))
    assert wire._layout.cache_info() == before
    decode_state(encode(State({"model": Tensors.zeros(layout)})))
    assert wire._layout.cache_info().misses == before.misses + 1


def test_a_message_of_another_kind_is_named():
    with pytest.raises(WireError, match="the message is of kind 'state'; expected 'upload'"):
        decode_upload(encode(State({"m": model()})))


def test_the_header_is_what_the_docstring_says():
    """The bytes are a safetensors file: 8 bytes of length, a JSON header, then the raw elements."""
    data = encode(State({"m": model([1.0])}, {"k": 1}))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["m"]["dtype"] == "F32"
    assert data[8 + length :] == torch.tensor([1.0]).numpy().tobytes()
