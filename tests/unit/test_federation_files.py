"""The files of a federation that a person writes: a site's, and the project's."""

import json

import pytest

from prefed.config import ConfigError
from prefed.networks.federation.config import SiteConfig, check_places
from prefed.networks.federation.flare.kits import Project, place_kit


def test_a_sites_file_is_checked(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text('federation = "wards"\nname = "a/b"\n[data]\n[model]\nname = "m"\n[limits]\nround = 3\n')
    with pytest.raises(ConfigError) as caught:
        SiteConfig.load(path)
    assert f"{path}: limits.round: no such key; did you mean 'rounds'?" in str(caught.value)
    assert f"{path}: name = 'a/b': 'a/b' is not a valid name: use" in str(caught.value)
    path.write_text('federation = "wards"\nname = "a"\n[data]\n[model]\nname = "m"\n')
    assert SiteConfig.load(path).state == str(tmp_path / "state")
    assert json.loads(SiteConfig.load(path).model_dump_json())["limits"]["minimum_cohort"] == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("[data]\ntrain = 'o.jsonl'\nmax_length = 9\nlimit = 3\n", ": data: limit is set by the experiment"),
        ("[data]\ntran = 'own.jsonl'\n", r": data: tran is not a known key: .*, flip; did you mean 'train'"),
        ("[data]\n[limits]\nmethods = ['feddpo', 'fedpo']\n", "limits.methods = .*: no method is called"),
        ("[data]\n[limits]\nexchanges = ['trian']\n", "limits.exchanges = .*: unknown exchange 'trian'"),
        ("[data]\n[limits]\nmethods = []\n", r"limits.methods = \[\]: an empty list allows nothing: add"),
        ("[data]\n[limits]\nexchanges = []\n", "limits.exchanges = .* remove the key to allow all"),
        ("[data]\n[limits]\njudgements = 9\n", r"site.toml: \[limits\] judgements requires \[judge\] name"),
        ("[data]\n[judge]\nname = 'own.judge:J'\n", "a site loads no judge from outside prefed"),
        ("[data]\n[judge]\nname = 'utility'\ntaste = 'ada'\n", "each client judges with its own taste"),
    ],
)
def test_a_sites_file_has_its_own_part_alone(tmp_path, lines, message):
    """It may not change what all sites train with. A list that allows nothing is not taken for "all"."""
    path = tmp_path / "site.toml"
    path.write_text(f'federation = "wards"\nname = "a"\nmodel = {{ name = "m" }}\n{lines}')
    with pytest.raises(ConfigError, match=message):
        SiteConfig.load(path)


def test_a_judge_is_looked_for_next_to_the_file(tmp_path):
    """A folder that is there; a server's model has no folder, and what is not there may be on the hub."""
    (tmp_path / "mine").mkdir()
    path, lines = tmp_path / "site.toml", 'federation = "wards"\nname = "a"\nmodel = { name = "m" }\n[data]\n'
    mine = f"{tmp_path}/mine"
    for name, expected in {
        "selector:mine": f"selector:{mine}",
        "reward:./mine": f"reward:{mine}",
        "reward:org/model": "reward:org/model",
        "endpoint:mine": "endpoint:mine",
        "people:later": f"people:{tmp_path}/later",
        "utility": "utility",
    }.items():
        path.write_text(f'{lines}[judge]\nname = "{name}"\n')
        assert SiteConfig.load(path).judge.name == expected


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("sites = ['a/b']", r"sites = \['a/b'\]: 'a/b' is not a valid name: use"),
        ('sites = ["a.b"]', r"sites = .*: 'a\.b': NVIDIA FLARE does not allow '\.' in a site's name: rename"),
        ("sites = ['a']\nporte = 9", r"porte: no such key; did you mean 'port'\?"),
        *(
            (
                f"sites = ['a']\nhub = {hub!r}",
                "hub = .*: must be a host name or an IPv4 address without scheme, port or path, e.g. fed",
            )
            for hub in ("https://localhost:8002", "localhost:8002", "fed.example.org/x", "-a", "a..b", "")
        ),
    ],
)
def test_a_project_file_is_checked(tmp_path, lines, message):
    """Before anything is made. FLARE has no point in a site's name, and adds scheme and port to the hub's."""
    path = tmp_path / "wards.toml"
    path.write_text(f"name = 'wards'\n{lines}\n" + ("" if "hub" in lines else "hub = 'localhost'\n"))
    with pytest.raises(ConfigError, match=message) as caught:
        Project.load(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("hub", ["localhost", "fed-1.example.org", "10.0.0.7", "X"])
def test_a_hub_has_a_host_name_or_an_address(hub):
    assert Project(name="wards", hub=hub, sites=["a"]).hub == hub


@pytest.mark.parametrize(
    ("load", "remedy"), [(Project.load, "name, hub and sites"), (SiteConfig.load, "federation init")]
)
def test_a_file_that_is_not_there_is_no_experiment(tmp_path, load, remedy):
    """`prefed init` writes experiments."""
    with pytest.raises(ConfigError, match=f"x.toml: no such file; .*{remedy}") as caught:
        load(tmp_path / "x.toml")
    assert "prefed init " not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("[data]\n", "data.train is missing: set it"),
        ("data = {train = {a = 'pairs.jsonl'}}\n", "data.train.a = 'pairs.jsonl': no such file or folder"),
        ("data = { train = ['here.jsonl', 'b.csv'] }\n", "data.train = 'b.csv': no such"),
        ("data = { train = 'here.jsonl', test = { path = 'b' } }\n", "data.test.path = 'b': no such"),
        ("data = {train = 'here.jsonl'}\nmodel.name = './model'\n", r"model.name = '\./model': no such"),
        ("data = {train = 'here.jsonl'}\nmodel.reward_model = '/a/b'\n", "reward_model = '/a/b': no such"),
        ("data = {train = 'here.jsonl'}\njudge.name = 'selector:run'\n", "name = 'selector:run': no such"),
    ],
)
def test_what_is_not_there_is_named_before_the_hub_asks(tmp_path, lines, message):
    path = tmp_path / "site.toml"
    (tmp_path / "here.jsonl").touch()
    model = "" if "model.name" in lines else "model.name = 'm'\n"
    path.write_text(f"federation = 'wards'\nname = 'a'\n{model}{lines}")
    with pytest.raises(ConfigError, match=message) as caught:
        check_places(SiteConfig.load(path))
    assert str(caught.value).startswith(f"{path}: ")


def test_what_is_there_or_may_be_on_the_hugging_face_hub_is_let_be(tmp_path):
    path = tmp_path / "site.toml"
    (tmp_path / "here.jsonl").touch()
    (tmp_path / "model").mkdir()
    for train in ("'here.jsonl'", "'Anthropic/hh-rlhf'", "{ a = 'here.jsonl', b = { path = 'here.jsonl' } }"):
        for model in ("./model", "model", "gpt2", "org/model"):
            path.write_text(
                f"federation = 'w'\nname = 'a'\n[data]\ntrain = {train}\n[model]\nname = {model!r}\n"
            )
            check_places(SiteConfig.load(path))


def test_a_kit_that_was_not_copied_whole_is_copied_again(tmp_path):
    """A link to nowhere ends the first copy. A kit that is there is kept with its key."""
    made, kit = tmp_path / "made", tmp_path / "north/kit"
    (made / "startup").mkdir(parents=True)
    (made / "local").mkdir()
    (made / "local/resources.json.default").write_text('{"class_allow_list": [], "components": []}')
    key = made / "startup/client.key"
    key.symlink_to("nowhere")
    with pytest.raises(OSError, match=r"client.key"):
        place_kit(made, kit, "read me")
    key.unlink()
    for text in ("the first", "another"):
        key.write_text(text)
        place_kit(made, kit, "read me")
    assert (kit / "startup/client.key").read_text() == "the first"
    assert json.loads((kit / "local/resources.json").read_text())["class_allow_list"]
    assert [path.name for path in kit.parent.iterdir()] == ["kit"]
