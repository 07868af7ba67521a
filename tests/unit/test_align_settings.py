"""What an alignment takes from earlier settings, and what overrides make of them."""

from types import SimpleNamespace

import pytest

from finished import write_run
from prefed.align import AlignError
from prefed.align.tastes import held_out
from prefed.config import ConfigError
from prefed.config.align import align_settings
from prefed.core import Key
from prefed.runs.align import read_settings, what_is_sent
from prefed.runs.finished_run import read_run


def test_a_key_that_is_given_takes_the_place_of_another_one(tmp_path):
    """Of keys that exclude each other, and with it go keys that need it; both given are refused as ever.
    Without a value a key is back at its default. A message names the file of a stored key."""

    def settled(stored, *given):
        overrides = [f"align.{text}" for text in given]
        found = align_settings({"prompts": "x", **stored}, overrides, tmp_path, tmp_path / "a.json")
        return found.model_dump(exclude_unset=True, exclude={"prompts"})

    tasting, judged = {"tastes": "posteriors", "generations": 2, "regenerate": 4}, {"labels": "judge:utility"}
    assert settled({"taste": "ghost", "limit": 3}, "tastes=prototypes") == {
        "tastes": "prototypes",
        "limit": 3,
    }
    assert settled(tasting, "taste=w1") == {"taste": "w1"}
    assert settled(judged, "taste=w1") == {"taste": "w1"}
    assert settled(judged, "tastes=posteriors", "generations=2") == {"tastes": "posteriors", "generations": 2}
    assert settled({**tasting, "lr": 0.1}, "labels=judge:utility") == {**judged, "lr": 0.1}
    assert settled({"labels": "judge:endpoint:m", "judge": {"url": "u"}}, "labels=0") == {"labels": 0}
    clients = {"generations": 2, "client_judge": "endpoint:m", "judge": {"url": "http://localhost:8000/v1"}}
    assert settled({**clients, "refresh": {}}, "labels=mean") == {**clients, "refresh": {}, "labels": "mean"}
    assert settled({"taste": "w1"}, "labels=0") == {"taste": "w1", "labels": 0}
    assert settled(tasting, "taste=population") == {**tasting, "taste": None}
    assert settled({"taste": "ghost", "limit": 3}, "taste=", "limit=", "lr=0.1") == {"lr": 0.1}
    assert settled(tasting, "tastes=") == {}
    with pytest.raises(ConfigError, match="remove taste = 'w1'"):
        settled({}, "taste=w1", "tastes=posteriors")
    with pytest.raises(ConfigError, match=r"tase: no such key"):
        settled({}, "tase=")
    with pytest.raises(ConfigError, match=r"\[align\] of .*a\.json with --set align\.lr=0\.1: .*requires"):
        settled({"regenerate": 2}, "lr=0.1")


def test_a_message_names_the_file_that_holds_the_key(tmp_path):
    """The last alignment's settings, else the run's own."""
    path = tmp_path / "run"
    record = read_run(write_run(path, settings={"align": {"prompts": "x", "regenerate": 2}}))
    with pytest.raises(ConfigError, match=r"\[align\] of .*run/config\.toml: "):
        read_settings(record)
    path.joinpath("align").mkdir()
    path.joinpath("align/settings.json").write_text('{"prompts": {"path": "y"}, "regenerate": 2}')
    with pytest.raises(ConfigError, match=r"\[align\] of .*run/align/settings\.json: "):
        read_settings(record)
    assert read_settings(record, ["align.tastes=posteriors"]).prompts.path == "y"


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.01, 1), (0.15, 2), (0.28, 3), (0.99, 9)])
def test_the_nearest_number_of_ten_prompts_is_held_out(share, count):
    """At least one and not all; each number is a prompt, and repeats of a prompt do not count."""
    alignment = SimpleNamespace(config=SimpleNamespace(held_out=share), key=Key(3))
    numbers = held_out(alignment, [*range(10), *range(10)]).tolist()
    assert len(numbers) == len(set(numbers)) == count
    assert set(numbers) <= set(range(10))


EVE = "https://eve.example.org/v1"
MINE = "http://localhost:8000/v1"


@pytest.mark.parametrize(
    ("part", "table"),
    [
        ("endpoint", lambda url: {"endpoint": {"model": "m", "url": url}}),
        ("judge", lambda url: {"labels": "judge:endpoint:m", "judge": {"url": url}}),
    ],
)
def test_a_run_directory_does_not_choose_who_receives_prompts(tmp_path, part, table):
    """The same settings are accepted with a server on this machine, or once the user has named theirs."""
    for name, url in (("eve", EVE), ("mine", MINE)):
        settings = {"align": {"prompts": {"path": "prompts.jsonl"}, **table(url)}}
        write_run(tmp_path / name, settings=settings)
    record, named = read_run(tmp_path / "eve"), f"align.{part}.url={EVE}"
    with pytest.raises(AlignError, match=f"send prompts and completions to {EVE}; .*--set {named}"):
        read_settings(record, ["align.prompts.path=prompts.jsonl"])
    for config, url in (
        (read_settings(record, [named]), EVE),
        (read_settings(read_run(tmp_path / "mine")), MINE),
    ):
        (sent,) = what_is_sent(config)
        assert f"sent to {url}" in sent
    if part == "judge":
        assert not list(what_is_sent(read_settings(record, ["align.labels=majority"])))
