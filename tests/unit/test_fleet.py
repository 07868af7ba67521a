"""The schedule of a fleet: small ones worked out by hand, and shares over many draws."""

from __future__ import annotations

import json
import sys
from itertools import islice

import numpy as np
import pytest
from pydantic import ValidationError

from prefed.core import Key
from prefed.engines.config import FleetConfig
from prefed.engines.simulated_fleet import FleetError, fleet_clients, schedule

KEY = Key(42)


def plan(rounds, members="abc", cohort=None, work=None, seed=42, **settings):
    """The first rounds of a schedule."""
    config = FleetConfig(**settings)
    return list(islice(schedule(config, list(members), cohort or len(members), Key(seed), work=work), rounds))


def merged(scheduled):
    return [[(visit.client, visit.started_from) for visit in one.visits] for one in scheduled]


def trace(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_a_synchronous_server_waits_for_the_slowest():
    """Visits of 1, 2 and 4 s and half a second for messages: rounds of 4.5 s."""
    scheduled = plan(3, work={"b": 2, "c": 4}, network=0.5)
    assert [one.at for one in scheduled] == [4.5, 9.0, 13.5]
    assert merged(scheduled) == [[(c, r) for c in "abc"] for r in range(3)]
    assert [visit.at for visit in scheduled[1].visits] == [6.0, 7.0, 9.0]
    assert [one.keep for one in scheduled] == [1, 2, 3]
    assert all(one.lost == () and one.staleness == 0 for one in scheduled)


def test_a_buffered_server_by_hand():
    """Visits of 2, 3 and 7 s, merges of two. 2: a waits, as nothing is new to it. 3: b; round 1; a and b from
    model 1. 5, 6: a, b; round 2. 7: c comes from model 0 and continues from 2. 8: a; round 3. 9: b, continues
    from 3. 10: a; round 4. 12: a and b; round 5. 14: a from 5, c from 2; round 6."""
    scheduled = plan(6, work={"a": 2, "b": 3, "c": 7}, server="buffered", buffer=2)
    assert [one.at for one in scheduled] == [3, 6, 8, 10, 12, 14]
    assert merged(scheduled) == [
        [("a", 0), ("b", 0)],
        [("a", 1), ("b", 1)],
        [("a", 2), ("c", 0)],
        [("a", 3), ("b", 2)],
        [("a", 4), ("b", 3)],
        [("a", 5), ("c", 2)],
    ]
    assert [one.staleness for one in scheduled] == [0, 0, 1, 0.5, 0.5, 1.5]
    assert [one.keep for one in scheduled] == [0, 0, 2, 2, 2, 5]


def test_two_uploads_of_one_client_in_a_round_are_of_two_models(tmp_path):
    """b and c make round 1 at 1 s. a replies from model 0 at 1.1, and after 0.2 s more from model 1: both are
    merged in round 2. From model 1 it is not asked again before."""
    path = trace(tmp_path, "client,start,end,seconds\na,0,1.1,1.1\na,1.1,,0.2\nb,,,1\nc,,,1\n")
    scheduled = plan(2, server="buffered", buffer=2, trace=path)
    assert merged(scheduled) == [[("b", 0), ("c", 0)], [("a", 0), ("a", 1)]]
    assert scheduled[1].at == pytest.approx(1.3)


def test_a_client_whose_reply_to_the_newest_model_waits_is_not_asked():
    """Merges of three: a and b reply at 1 and 1.5, and wait for c, who takes 9 s."""
    scheduled = plan(2, work={"b": 1.5, "c": 9}, server="buffered", buffer=3)
    assert merged(scheduled) == [[(client, number) for client in "abc"] for number in (0, 1)]
    assert [one.at for one in scheduled] == [9, 18]


def test_replies_of_one_moment_make_several_rounds():
    """Five replies at 1 s, merges of two: rounds 1 and 2 at once, and one reply is left for round 3."""
    scheduled = plan(3, "abcde", server="buffered", buffer=2)
    assert [one.at for one in scheduled] == [1, 1, 2]
    assert merged(scheduled)[:2] == [[("a", 0), ("b", 0)], [("c", 0), ("d", 0)]]
    assert ("e", 0) in merged(scheduled)[2] or merged(scheduled)[2][0][1] == 2
    assert scheduled[1].staleness == 1


def test_drawn_delays():
    """q is uniform over 0 to 3, and cut at the number of rounds that there were."""
    scheduled = plan(400, "ab", max_delay=3)
    late = [[one.late(visit) for visit in one.visits] for one in scheduled]
    assert [max(lates) <= number for number, lates in enumerate(late)] == [True] * 400
    counts = np.bincount(np.ravel(late[3:]), minlength=4)
    assert len(counts) == 4
    # 794 draws over four: a standard deviation of 12 about 198.5.
    assert abs(counts - 198.5).max() < 5 * 12.2
    assert [one.at for one in scheduled[:3]] == [1, 2, 3]
    assert [one.keep for one in scheduled[:6]] == [0, 0, 0, 1, 2, 3]


def test_times_of_presence_from_a_file(tmp_path):
    """a is there until 10 s and from 20 s to 30 s, and takes 6 s; b takes 4 s. 6: both. 10: b alone, a has
    gone. 14, 18, 22: b. 28: both, as a came back before 22."""
    path = trace(tmp_path, "client,start,end,seconds\na,20,30,6\nb,,,4\na,0,10,6\n")
    scheduled = plan(6, "ab", trace=path)
    assert [one.at for one in scheduled] == [6, 10, 14, 18, 22, 28]
    assert ["".join(v.client for v in one.visits) for one in scheduled] == ["ab", "b", "b", "b", "b", "ab"]
    assert [(v.client, v.started_from, v.asked, v.at) for v in scheduled[1].lost] == [("a", 1, 6, 10)]


def test_the_server_waits_until_somebody_comes(tmp_path):
    """There from 5 to 9, and 10 s later again: replies at 6, 7, 8 and 9, which is just in time, then 16."""
    rows = [{"client": "a", "start": 5, "end": 9}]
    path = trace(tmp_path, "\n".join(map(json.dumps, rows)), "trace.jsonl")
    for server in ("synchronous", "buffered"):
        again = plan(5, "a", server=server, trace=path, period=10)
        assert [one.at for one in again] == [6, 7, 8, 9, 16]
        with pytest.raises(FleetError, match="round 5: no client is online after 9 s"):
            plan(5, "a", server=server, trace=path)


def test_a_buffered_server_asks_whoever_comes(tmp_path):
    """Two at work wanted. b comes at 2 while a works until 5, so its reply at 3 is merged first."""
    path = trace(tmp_path, "client,start,end,seconds\na,,,5\nb,2,8,1\n")
    scheduled = plan(2, "ab", server="buffered", buffer=1, trace=path)
    assert [(one.at, one.visits[0].client, one.visits[0].asked) for one in scheduled] == [
        (3, "b", 2),
        (4, "b", 3),
    ]


def test_windows_that_touch_are_one_and_the_speed_is_that_of_the_start(tmp_path):
    """1.5 s a visit before 2 s, 3 s after: 1.5, then 3.0 across the border, then 6.0. Cycles of 0.3 s touch
    too, though 3 · 0.1 is not 0.3."""
    path = trace(tmp_path, "client,start,end,seconds\na,0,2,1.5\na,2,10,3\n")
    assert [one.at for one in plan(3, "a", trace=path)] == [1.5, 3.0, 6.0]
    path = trace(tmp_path, "client,start,end\na,0,0.3\n")
    assert [one.at for one in plan(50, "a", trace=path, period=0.3, seconds=1)] == list(range(1, 51))


def test_lost_visits():
    """A tenth to a third of 3,000 visits: a standard deviation of 25. A visit that is lost ends early."""
    scheduled = plan(1000, dropout=0.3)
    lost = [visit for one in scheduled for visit in one.lost]
    replies = sum(len(one.visits) for one in scheduled)
    assert abs(len(lost) / (len(lost) + replies) - 0.3) < 0.05
    lasted = np.array([visit.at - visit.asked for visit in lost])
    assert lasted.max() < 1
    assert abs(lasted.mean() - 0.5) < 0.05


def test_a_round_without_a_reply_is_asked_for_again():
    """One client that replies to every tenth visit or so: rounds still have a reply each, later."""
    scheduled = plan(30, "a", dropout=0.9)
    assert all(len(one.visits) == 1 and one.visits[0].started_from == one.number - 1 for one in scheduled)
    assert sum(len(one.lost) for one in scheduled) > 100


def test_presence_by_distribution():
    """There for 3 s and away for 1 s in the mean: three clients of four at any time."""
    config = FleetConfig(online=3, offline=1)
    clients = fleet_clients(config, [str(k) for k in range(400)], KEY)
    for now in (0.0, 50.0):
        there = sum(client.present(now) for client in clients.values())
        # A standard deviation of 8.7.
        assert abs(there - 300) < 45
    scheduled = plan(200, online=3, offline=1)
    assert any(one.lost for one in scheduled)
    assert {len(one.visits) for one in scheduled} == {1, 2, 3}


@pytest.mark.parametrize(
    ("settings", "deviation"),
    [
        ({"speeds": "uniform", "spread": 0.5}, 0.5 / 3**0.5),
        ({"speeds": "lognormal", "spread": 0.4}, (np.exp(0.16) - 1) ** 0.5),
        ({"speeds": "exponential"}, 1.0),
        ({"speeds": "equal"}, 0.0),
    ],
)
def test_speeds_have_the_mean_that_was_asked_for(settings, deviation):
    """2,000 clients; the deviation is that of the distribution with mean 1."""
    config = FleetConfig(seconds=10, **settings)
    clients = fleet_clients(config, [str(k) for k in range(2000)], KEY)
    times = np.array([client.visit(0.0, 1.0)[0] for client in clients.values()])
    assert abs(times.mean() / 10 - 1) < 0.1
    assert abs(times.std() / 10 - deviation) < 0.1


def test_jitter_is_of_the_visit_and_speed_of_the_client():
    config = FleetConfig(speeds="lognormal", spread=1.0, jitter=0.1)
    client = fleet_clients(config, ["a"], KEY)["a"]
    times = np.log([client.visit(0.0, 1.0)[0] for _ in range(500)])
    assert abs(times.std() - 0.1) < 0.02


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,start\nx,1\n", "line 2: no training client is called 'x'"),
        ("start\n1\n", "line 2: client is missing"),
        ("client,start\na,1,2\n", "line 2: the number of cells differs from the header"),
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: not a JSON object"),
        ("client,start\na,nan\n", "line 2: start = nan: must be finite"),
        ("client,begin\na,1\n", "line 2: no such column: 'begin'"),
        ("client,start\na,soon\n", "line 2: start = 'soon': must be a number"),
        ("client,start,end\na,2,2\n", "line 2: end = 2: must be after start = 2"),
        ("client,start,end\na,2,11\n", "line 2: end = 11: must not be after period = 10"),
        ("client,dropout\na,1\n", "line 2: dropout = 1: must be below 1"),
        ("client,start,end\na,2,6\na,1,3\n", "line 2: this window of client 'a' starts at 2, before another"),
        ("client,start\na,1\n", "client 'b' has no row"),
    ],
)
def test_wrong_traces_are_refused(tmp_path, text, message):
    path = trace(tmp_path, text, "trace.csv" if "client" in text or "start" in text else "trace.jsonl")
    with pytest.raises(ValueError, match=message) as caught:
        plan(1, "ab", trace=path, period=10)
    assert str(caught.value).startswith(path)


def test_a_fleet_whose_visits_never_end_with_a_reply_is_given_up(tmp_path, monkeypatch):
    """There for 5 s of every 10, and a visit takes 6: the schedule would continue for ever."""
    monkeypatch.setattr(sys.modules["prefed.engines.simulated_fleet"], "VAIN", 50)
    path = trace(tmp_path, "client,start,end\na,0,5\n")
    for server in ("synchronous", "buffered"):
        with pytest.raises(FleetError, match=r"round 1: 50 consecutive visits .* the last one of 'a'"):
            plan(1, "a", server=server, trace=path, period=10, seconds=6)
    with pytest.raises(FleetError, match="buffer = 2: only 1 clients train"):
        plan(1, "a", server="buffered", buffer=2)


def test_a_client_called_0_in_json_lines(tmp_path):
    (one,) = plan(1, "0", trace=trace(tmp_path, '{"client": 0, "seconds": 2}', "trace.jsonl"))
    assert one.at == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server": "buffered", "max_delay": 1}, "max_delay is only for server = 'synchronous': remove it"),
        ({"buffer": 2}, "buffer is only for server = 'buffered': remove it, or set server"),
        ({"speeds": "uniform"}, "spread is required for speeds 'uniform' and 'lognormal'"),
        ({"speeds": "uniform", "spread": 1}, "spread of uniform speeds must be below 1"),
        ({"trace": "x.csv", "online": 1, "offline": 1}, "the trace defines when clients are online"),
        ({"online": 1}, "online and offline must be set together"),
        ({"period": 5}, "period is only for a trace: set trace, or remove period"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        FleetConfig(**settings)
