import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefed.data import Message, Record

texts = st.text(st.characters(exclude_categories=["Cs"]))
responses = texts.filter(str.strip)
plain = st.one_of(texts, st.integers(-(2**40), 2**40), st.floats(allow_nan=False, allow_infinity=False))
prompts = st.one_of(
    texts,
    st.lists(st.builds(Message, st.sampled_from(["system", "user", "assistant"]), texts), min_size=1).map(
        tuple
    ),
)


@given(
    prompts,
    responses,
    responses,
    st.none() | st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.none() | responses,
    st.dictionaries(responses, plain, max_size=3),
)
def test_written_and_read_again_is_the_same(prompt, chosen, rejected, margin, client, extra):
    """The JSON of a record has all its fields, and it is one line for any texts."""
    if chosen == rejected:
        return
    record = Record(prompt, chosen, rejected, margin=margin, client=client, extra=extra)
    line = record.to_json()
    assert "\n" not in line
    assert Record.from_json(line) == record
    assert Record.from_json(line.encode()) == record


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chosen": " \n"}, "chosen is empty"),
        ({"rejected": ""}, "rejected is empty"),
        ({"rejected": " yes"}, "are the same"),
        ({"margin": math.nan}, "margin must be a finite 32-bit number, not nan"),
        ({"margin": -3.41e38}, "margin must be a finite 32-bit number"),
        ({"chosen": "half \ud83d"}, "chosen has half a surrogate pair at character 6"),
        ({"chosen": 3}, "chosen must be text, not int"),
    ],
)
def test_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        Record(**({"prompt": "Q", "chosen": " yes", "rejected": " no"} | fields))


def test_the_largest_margin_is_the_largest_32_bit_float():
    largest = float(np.finfo(np.float32).max)
    assert Record("Q", "a", "b", margin=-largest).margin == -largest
    with pytest.raises(ValueError, match="must be a finite"):
        Record("Q", "a", "b", margin=np.nextafter(largest, math.inf))


def test_a_message_has_a_known_role():
    with pytest.raises(ValueError, match="not 'tool'"):
        Message("tool", "x")


def test_columns_are_fields_and_extra():
    """A field with a value hides an extra of the same name. A field without a value does not."""
    record = Record("Q", "a", "b", client="w", extra={"client": "other", "category": "c", "lang": "go"})
    assert record.column("client") == "w"
    assert record.column("category") == "c"
    assert record.column("lang") == "go"
    assert record.column("missing") is None
    assert record.columns == ("client", "client", "category", "lang")


def test_swapped_twice_is_the_record():
    record = Record("Q", "a", "b", margin=2.0, extra={"n": 1}, ended=(True, False))
    assert Record.from_json(record.to_json()) == record
    assert record.swapped().ended == (False, True)
    assert record.swapped().swapped() == record
    assert record.swapped().margin == 2.0
