"""Members of a federation over NVIDIA FLARE, by real processes: none of them ends the session of all."""

import importlib
import sys
from pathlib import Path

import pytest

from prefed.networks.federation.transport import FederationError, UnreachableError
from waiting import WATCHDOG, until

pytest.importorskip("nvflare", reason="needs prefed[nvflare]")

from prefed.networks.federation.flare import transport as over_flare
from prefed.networks.federation.flare.guard import invalid_reply, without_start

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
members = importlib.import_module("members")


def echo(site, request):
    return request + site.encode()


def test_no_member_ends_the_session_of_the_others(tmp_path, monkeypatch):
    """All of them at once. North answers throughout in one session, and the slow site once it has joined.
    Each other one is named when it is asked, but for the one that lies, whose report is dropped."""
    monkeypatch.setattr(over_flare, "JOIN", 30.0)
    with members.Members(tmp_path, [*members.DOES], echo, sleeps=60.0) as place:
        ask = place.transport.call
        assert ask("north", b"1 ", WATCHDOG, 99) == b"1 north"
        session = place.transport._session
        assert ask("reports", b"1 ", WATCHDOG, 99) == b"1 reports"
        for site in {*members.DOES} - {"reports", "slow"}:
            with pytest.raises(UnreachableError, match=r"not joined the session within 30|not connected"):
                ask(site, b"1 ", WATCHDOG, 99)
            assert ask("north", b"2 ", WATCHDOG, 99) == b"2 north"
        until(lambda: "slow" in place.transport._inside, "the slow site to join")
        assert ask("slow", b"3 ", WATCHDOG, 99) == b"3 slow"
        assert ask("north", b"3 ", WATCHDOG, 99) == b"3 north"
        assert place.transport._session == session
        log = (place.kits / "hub/server/log.txt").read_text()
        for words in ("task:report_job_failure", "'garbles' sent an invalid reply", "'errors' did not start"):
            assert words in log, words


@pytest.mark.rare
def test_one_of_them_ends_each_session_of_flares_own(tmp_path):
    """The control: without prefed's checks and controller, north is reached only without the other site."""
    with members.Members(tmp_path, ["exits"], echo, guarded=False) as place:
        place.transport.restrict(["north"])
        assert place.transport.call("north", b"1 ", WATCHDOG, 99) == b"1 north"
        place.transport.restrict(place.sites)
        with pytest.raises((FederationError, UnreachableError)):
            place.transport.call("exits", b"1 ", WATCHDOG, 99)
        with pytest.raises((FederationError, UnreachableError)):
            place.transport.call("north", b"1 ", WATCHDOG, 99)


def replied(topic, body, **headers):
    from nvflare.private.admin_defs import Message

    made = Message(f"reply_{topic}", body)
    made.headers = headers
    return made


def test_a_reply_with_which_flares_server_would_fail_is_none():
    from nvflare.apis.shareable import Shareable
    from nvflare.private.defs import ERROR_MSG_PREFIX
    from nvflare.private.fed.server.message_send import ClientReply
    from nvflare.private.scheduler_constants import ShareableHeader

    check, start = "scheduler.check_resource", "train.start_job"
    enough = Shareable()
    enough.set_header(ShareableHeader.IS_RESOURCE_ENOUGH, True)
    strange = Shareable()
    strange.set_header(ShareableHeader.IS_RESOURCE_ENOUGH, [1])
    good = [(check, replied(check, enough)), (start, replied(start, "OK")), (check, None)]
    good.append((check, replied(check, "no room", _rtnCode="_error")))
    bad = [(check, replied(check, "yes")), (check, replied(check, strange)), (start, "OK"), (start, {})]
    bad.append((start, replied(start, "OK", _rtnCode=[1])))
    assert [invalid_reply(reply, topic) for topic, reply in good + bad] == [False] * 4 + [True] * 5
    replies = [
        ClientReply("t", "ok", None, replied(start, "OK")),
        ClientReply("t", "error", None, replied(start, f"{ERROR_MSG_PREFIX}: no")),
        ClientReply("t", "late", None, None),
    ]
    assert without_start(replies, ["ok", "error", "late", "gone"]) == ["error", "late", "gone"]
