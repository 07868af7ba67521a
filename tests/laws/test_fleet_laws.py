"""Laws of schedules, over random fleets."""

from __future__ import annotations

from itertools import islice, pairwise

import hypothesis.strategies as st
from hypothesis import given

from prefed.core import Key
from prefed.engines.config import FleetConfig
from prefed.engines.simulated_fleet import schedule

ROUNDS = 12


@st.composite
def fleets(draw: st.DrawFn):
    """Settings, members, cohort and key."""
    members = [f"c{k}" for k in range(draw(st.integers(1, 8)))]
    buffered = draw(st.booleans())
    speeds = draw(st.sampled_from(["equal", "uniform", "lognormal", "exponential"]))
    config = FleetConfig(
        server="buffered" if buffered else "synchronous",
        buffer=draw(st.none() | st.integers(1, len(members))) if buffered else None,
        max_delay=0 if buffered else draw(st.integers(0, 3)),
        speeds=speeds,
        spread=0.7 if speeds in ("uniform", "lognormal") else None,
        jitter=draw(st.sampled_from([0.0, 0.3])),
        dropout=draw(st.sampled_from([0.0, 0.4])),
        **draw(st.sampled_from([{}, {"online": 5.0, "offline": 2.0}])),
    )
    return config, members, draw(st.integers(1, len(members))), Key(draw(st.integers(0, 2**32)))


def rounds(fleet, start=0, end=ROUNDS):
    return list(islice(schedule(*fleet), start, end))


@given(fleets())
def test_a_schedule_is_a_function_of_seed_and_fleet_and_resumes_anywhere(fleet):
    whole = rounds(fleet)
    assert rounds(fleet) == whole
    assert rounds(fleet, 5) == whole[5:]


@given(fleets())
def test_no_client_is_asked_while_it_works(fleet):
    turns: dict[str, list[tuple[float, float]]] = {}
    for scheduled in rounds(fleet):
        for visit in (*scheduled.visits, *scheduled.lost):
            turns.setdefault(visit.client, []).append((visit.asked, visit.at))
    for mine in turns.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(mine)))


@given(fleets())
def test_at_most_a_cohort_is_at_work(fleet):
    visits = [v for one in rounds(fleet) for v in (*one.visits, *one.lost)]
    for now in {visit.asked for visit in visits}:
        assert sum(v.asked <= now < v.at for v in visits) <= fleet[2]


@given(fleets())
def test_rounds_follow_one_another(fleet):
    config, members, cohort, _ = fleet
    scheduled = rounds(fleet)
    assert [one.number for one in scheduled] == list(range(1, ROUNDS + 1))
    assert [one.at for one in scheduled] == sorted(one.at for one in scheduled)
    for one in scheduled:
        names = [(visit.client, visit.started_from) for visit in one.visits]
        assert names == sorted(set(names))
        assert {client for client, _ in names} <= set(members)
        assert all(one.late(visit) >= 0 and visit.asked <= visit.at <= one.at for visit in one.visits)
        if config.server == "buffered":
            assert len(names) == (config.buffer or cohort)
        else:
            assert len(names) <= cohort
            assert all(one.late(visit) <= config.max_delay for visit in one.visits)


@given(fleets())
def test_models_that_are_still_needed_are_named(fleet):
    """``keep`` of a round is no newer than any later start, and it does not fall behind."""
    scheduled = rounds(fleet)
    for one in scheduled:
        later = [visit.started_from for after in scheduled[one.number :] for visit in after.visits]
        assert one.keep <= min(later, default=one.number)
        assert one.keep <= one.number
    assert [one.keep for one in scheduled] == sorted(one.keep for one in scheduled)


@given(st.integers(1, 8), st.data(), st.integers(0, 2**32))
def test_without_delays_and_differences_any_server_is_the_synchronous_one(number, data, seed):
    """The cohorts are those that :class:`prefed.engines.Job` draws, and all start from the newest model."""
    members, cohort = [f"c{k}" for k in range(number)], data.draw(st.integers(1, number))
    plain = rounds((FleetConfig(), members, cohort, Key(seed)))
    assert rounds((FleetConfig(server="buffered"), members, cohort, Key(seed))) == plain
    for one in plain:
        draw = Key(seed).at("round", one.number).at("cohort").numpy().choice(number, cohort, replace=False)
        assert [visit.client for visit in one.visits] == [members[index] for index in sorted(draw)]
        assert all(one.late(visit) == 0 for visit in one.visits)
        assert one.at == one.number


@given(fleets())
def test_speeds_do_not_change_who_is_drawn_by_a_synchronous_server(fleet):
    config, members, cohort, key = fleet
    usual = FleetConfig(max_delay=config.max_delay)
    if config.server == "synchronous" and not config.dropout and config.online is None:
        mine, plain = rounds(fleet), rounds((usual, members, cohort, key))
        starts = [
            [[(v.client, v.started_from) for v in one.visits] for one in many] for many in (mine, plain)
        ]
        assert starts[0] == starts[1]
