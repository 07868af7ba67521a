"""Long answers of a site, which come in parts; without a process of NVIDIA FLARE."""

from types import SimpleNamespace

import pytest

from prefed.networks.federation.unix_socket import pack, unpack

pytest.importorskip("nvflare", reason="needs prefed[nvflare]")

from prefed.networks.federation.flare import relays
from prefed.networks.federation.flare.relays import SITE_DOOR, hand


@pytest.mark.parametrize(
    ("first", "parts"),
    [
        (b"\xff" * 40, ()),
        (None, ()),
        (pack(b"ab", length="2", name="n"), ()),
        (pack(b"abc", length=2, name="n"), ()),
        (pack(b"ab"), ()),
        (pack(b"ab", length=4, name="n"), (b"",)),
        (pack(b"ab", length=4, name="n"), (b"cde",)),
        (pack(b"ab", length=4, name="n"), (5,)),
    ],
)
def test_parts_that_do_not_fit_are_no_answer(first, parts):
    """A site's process may be anybody's. Nothing it gives opens another session, or is asked for for ever."""
    call = SimpleNamespace(
        exchange=lambda request: first, rest=lambda name, start, left=[*parts]: left.pop(0)
    )
    answer = hand({"north": lambda timeout: call}, pack(b"visit", site="north", timeout=1, most=100))
    assert unpack(answer) == ({}, b"")


def test_a_site_gives_the_rest_to_the_hub_alone(monkeypatch):
    """By the name of an answer that the hub received, once; of five answers the oldest is not kept."""
    monkeypatch.setattr(relays, "when_gone", lambda door, end: None)
    monkeypatch.setenv(SITE_DOOR, "/door")
    monkeypatch.setattr(relays, "PART", 4)
    monkeypatch.setattr(relays, "ask", lambda door, request: request * 3)
    monkeypatch.setattr(relays, "collab", SimpleNamespace(caller="server"))
    relay = relays.SiteRelay()
    names = [
        unpack(relay.exchange(request))[0]["name"] for request in (b"one", b"two", b"six", b"ten", b"ace")
    ]
    assert relay.rest(names[0], 4) == b""
    assert [relay.rest(names[1], start) for start in (4, 8, 8)] == [b"wotw", b"o", b""]
    monkeypatch.setattr(relays, "collab", SimpleNamespace(caller="south"))
    assert relay.rest(names[2], 4) == b""
