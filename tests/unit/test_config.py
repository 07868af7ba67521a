"""The experiment file: what it accepts, what it says of what it does not."""

import inspect
import json
import re
import tomllib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefed.config import CohortConfig, ConfigError, Experiment, to_toml
from prefed.config.new_file import Recipe, example_file, learning_rates, model_width, recipe, starting_file
from prefed.engines import job
from prefed.engines.job import JobError
from prefed.methods import METHODS
from prefed.runs.build import config_error
from prefed.train.losses import OBJECTIVES
from prefed.train.metrics import TEXT_REMEDY

BASE = """
rounds = 3
[data]
train = "pairs.jsonl"
partition = { by = "iid", clients = 3 }
[model]
name = "distilbert/distilgpt2"
[method]
name = "feddpo"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "exp.toml"
    path.write_text(BASE)
    return path


def test_a_resolved_experiment_reads_back_as_itself(subtests):
    """Law: parse ∘ to_toml is the identity, for every method and its settings."""
    for method in METHODS:
        with subtests.test(method=method):
            experiment = Experiment.parse(starting_file(method))
            assert Experiment.parse(to_toml(experiment)) == experiment
            assert tomllib.loads(to_toml(experiment)) == experiment.tables()
            steps = {"local_steps": 7, "betas": [0.8, 0.9]}
            changed = Experiment.model_validate(
                {**tomllib.loads(starting_file(method)), "method": {"name": method, **steps}}
            )
            assert Experiment.parse(to_toml(changed)) == changed
            assert changed.method.settings.local_epochs is None


def test_an_unknown_key_is_named_with_the_one_that_is_meant(file, subtests):
    for override, words in (
        ("method.learning_rate=1", "method.learning_rate: no such key; did you mean 'lr'?"),
        ("method.rpo_alpha=1", "no such key; did you mean 'method.objective_settings.alpha'?"),
        ("objective=rpo", "objective: no such key; did you mean 'method.objective'?"),
        ("method={name='fedsft',objective='rpo'}", "method.objective: no such key; known keys of fedsft: "),
        ("method.batch=2", "method.batch: no such key; did you mean 'batch_size'?"),
        ("model.lora.r=2", "model.lora.r: no such key; did you mean 'rank'?"),
        ("model.lora_rank=2", "model.lora_rank: no such key; did you mean 'model.lora.rank'?"),
        ("method.topology=star", "method.topology: no such key; did you mean 'graph.name'?"),
        ("merge.optimiser.lr=1", "merge.optimiser: no such key; did you mean 'optimizer'?"),
        ("data.partition={by='column',column='x',columm=2}", "data.partition.columm: no such key; did you"),
        ("data.columns.promt=x", "data.columns.promt: no such key; did you mean 'prompt'?"),
        ("cohort.zzz=1", "cohort.zzz: no such key; known keys: fraction, offences, sampling, size"),
    ):
        with subtests.test(override=override, words=words):
            with pytest.raises(ConfigError) as caught:
                Experiment.load(file, [override])
            assert words in str(caught.value)


def test_the_advice_for_broken_text_can_be_followed(file):
    keys = re.findall(r"method\.[a-z_.]+", TEXT_REMEDY)
    assert keys == ["method.objective", "method.objective_settings.alpha", "method.lr"]
    experiment = Experiment.load(file, [f"{keys[0]}=rpo", f"{keys[1]}=2", f"{keys[2]}=0.5"])
    assert experiment.method.settings.goal().settings["alpha"] == 2.0


def test_everything_wrong_is_named_at_once(file):
    """Lines from the file carry its name, those from the command line the option."""
    file.write_text(BASE + "lrr = 1\nbatch_size = 0\n")
    with pytest.raises(ConfigError) as caught:
        Experiment.load(file, ["cohort.size=0"])
    lines = str(caught.value).splitlines()
    assert sorted(lines) == sorted(
        [
            f"{file}: method.lrr: no such key; did you mean 'lr'?",
            f"{file}: method.batch_size = 0: should be greater than or equal to 1",
            "--set cohort.size=0: cohort.size = 0: should be greater than or equal to 1",
        ]
    )


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("method.lr=1e-3", 0.001),
        ("method.betas=[0.5, 0.6]", (0.5, 0.6)),
        ("method.objective=ipo", "ipo"),
        ('method.objective="ipo"', "ipo"),
        ("method.objective_settings={label_smoothing=0.2}", {"label_smoothing": 0.2}),
    ],
)
def test_overrides_are_toml_or_bare_words(file, override, value):
    objective = ["method.objective=cdpo"] if "smoothing" in override else []
    settings = Experiment.load(file, [*objective, override]).method.settings
    assert getattr(settings, override.split("=")[0].split(".")[1]) == value


def test_later_overrides_win_and_tables_can_be_opened(file):
    experiment = Experiment.load(
        file, ["cohort.size=2", "cohort.size=3", "model.lora.rank=4", "data.partition.clients=9"]
    )
    assert (experiment.cohort.size, experiment.model.lora.rank) == (3, 4)
    assert experiment.data.partition.clients == 9
    assert Experiment.load(file, ["method=fedprox"]).method.name == "fedprox"


@given(st.text(min_size=1))
def test_any_override_is_accepted_or_refused_in_words(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(BASE)
    with suppress(ConfigError):
        assert Experiment.load(path, [f"method.objective={text}"]).method.settings.objective in OBJECTIVES


def test_paths_start_from_the_file_or_else_from_where_one_is(tmp_path, monkeypatch, file):
    """What exists next to the file becomes absolute; a hub name stays."""
    other, here = tmp_path / "pairs.jsonl", tmp_path / "elsewhere" / "mine.jsonl"
    here.parent.mkdir()
    other.write_text("")
    here.write_text("")
    (here.parent / "pairs.jsonl").write_text("")
    monkeypatch.chdir(here.parent)
    experiment = Experiment.load(file, ["data.test=mine.jsonl"])
    assert experiment.data.train.path == str(other)
    assert experiment.data.test.path == str(here)
    assert experiment.model.name == "distilbert/distilgpt2"
    assert Experiment.load(file, ["data.train=pairs.jsonl"]).data.train.path == str(
        here.parent / "pairs.jsonl"
    )
    many = Experiment.load(
        file, ['data.train={a="mine.jsonl", b={path="pairs.jsonl"}}', "data.partition={by='source'}"]
    )
    assert [source.path for source in many.data.train.values()] == [
        str(here),
        str(here.parent / "pairs.jsonl"),
    ]
    assert Experiment.parse(to_toml(experiment)) == experiment


@pytest.mark.parametrize(
    ("fraction", "clients", "size"), [(0.1, 53, 5), (0.1, 56, 6), (0.001, 10, 1), (1.0, 7, 7)]
)
def test_a_fraction_of_clients(fraction, clients, size):
    assert CohortConfig(fraction=fraction).of(clients) == size


def test_a_starting_file_loads_and_says_what_the_defaults_are(subtests):
    """Every key of every record is in the file; uncommented one by one, each default it shows loads and
    changes nothing."""
    for method in METHODS:
        with subtests.test(method=method):
            text = starting_file(method)
            plain = Experiment.parse(text)
            lines = text.splitlines()
            before = lines[: lines.index("# [fleet]")]
            shown = [number for number, line in enumerate(before) if line.startswith("# ") and " = " in line]
            shown = [number for number in shown if lines[number].split(" = ")[0][2:].isidentifier()]
            assert len(shown) > 30
            if method != "feddpo":  # other tables are the same
                own = lines.index("[method]")
                shown = [number for number in shown if own < number < lines.index("", own)]
            for number in shown:
                opened = [*lines[:number], lines[number][2:], *lines[number + 1 :]]
                assert Experiment.parse("\n".join(opened)) == plain, lines[number]
            for key in tomllib.loads(to_toml(plain))["method"]:
                assert any(line.removeprefix("# ").startswith(f"{key} =") for line in lines), key
            uncommented = [n for n, line in enumerate(lines) if line and line[0] not in "#[" and n]
            assert all(lines[number - 1].startswith(("# ", "[")) for number in uncommented)


@pytest.mark.parametrize(
    ("config", "width", "rate"),
    [
        ({"hidden_size": 576}, 576, 1e-3),  # 0.6 / 576 = 1.04e-3
        ({"n_embd": 256}, 256, 2e-3),  # 0.6 / 256 = 2.34e-3
        ({"text_config": {"hidden_size": 4096}}, 4096, 1e-4),  # 0.6 / 4096 = 1.46e-4
    ],
)
def test_a_starting_file_has_rates_for_the_models_width(config, width, rate, tmp_path):
    """lr = 0.6 / hidden size to one digit, for every Adam method that trains a policy, and no other."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_width(str(tmp_path)) == width
    for kind in METHODS.values():
        default = kind.Settings()
        rates, first = learning_rates(kind, width), recipe(kind, str(tmp_path))
        assert first == Recipe(rates, None, width if rates else None)
        settings = Experiment.parse(starting_file(kind.name, str(tmp_path), first)).method.settings
        if kind.reads == "choice" or default.optimizer == "sgd":
            assert rates == {}
            assert settings.lr == default.lr
        else:
            assert settings.lr == rate
            assert getattr(settings, "personal_lr", None) in (rate, None)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"hidden_size": "wide"}', '{"hidden_size": 0}', "{}"])
def test_a_model_whose_width_is_not_known_leaves_the_default_rates(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    assert model_width(str(tmp_path)) is None
    assert model_width(str(tmp_path / "nowhere")) is None
    assert model_width("no-such/model") is None
    assert model_width("//") is None


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_model_gets_the_recipe_that_keeps_text_whole(name, tmp_path):
    """Where a method has the setting ``objective``; the rate follows the width as for any model."""
    (tmp_path / "config.json").write_text('{"hidden_size": 576}')
    (tmp_path / name).write_text('{"chat_template": "{{ messages }}"}')
    for kind in METHODS.values():
        first = recipe(kind, str(tmp_path))
        texts = [starting_file(kind.name, str(tmp_path), first)]
        texts += [] if kind.reads == "choice" else [example_file(kind.name, "p.jsonl", str(tmp_path), first)]
        for text in texts:
            made = Experiment.parse(text)
            if "objective" in kind.Settings.model_fields:
                assert (made.method.settings.objective, made.rounds) == ("rpo", 4)
                assert made.method.settings.goal().settings == {"beta": 0.1, "alpha": 1.0}
            else:
                assert first.rounds is None
            assert made.method.settings.lr == first.method.get("lr", kind.Settings().lr)


@pytest.mark.parametrize(
    ("name", "method", "without", "shown"),
    [
        ("fleet", "feddpo", None, {}),
        ("graph", "feddpo", None, {}),
        ("align", "fedbis", "feddpo", {"prompts": "prompts.jsonl"}),
        ("report", "feddpo", "fedbis", {"prompts": "How can I sleep better?"}),
        ("track", "feddpo", None, {"to": ["tensorboard"]}),
    ],
)
def test_a_starting_file_has_the_keys_of_optional_tables_behind_comments(name, method, without, shown):
    """With # taken from the table's name and all keys with a value, the file loads with the defaults. Tables
    are there for the methods that have a use for them."""
    head, found, table = starting_file(method).partition(f"# [{name}]\n")
    table = table.partition("# [")[0]
    keys = [line[2:] for line in table.splitlines() if re.match(r"# \w+ = ", line)]
    made = getattr(Experiment.parse("\n".join([head, f"[{name}]", *keys])), name)
    assert made == type(made)(**shown)
    assert all(f"\n# {key} =" in f"\n{table}" for key in type(made).model_fields)
    assert getattr(Experiment.parse(head + found + table), name) is None
    assert without is None or found not in starting_file(without)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"rounds": 0}, [("rounds = 0",)]),
        ({"method": {"name": "feddp"}}, [("method", "'feddp'", "'feddpo'")]),
        ({"method": {"name": "feddpo", "lr": -1, "bet": 1}}, [("method.lr = -1",), ("method.bet", "'beta'")]),
        (
            {"data": {"train": ("a.jsonl", 3), "partition": {"by": "iid"}}},
            [("data.train = 3",), ("clients",)],
        ),
    ],
    ids=lambda value: None if isinstance(value, list) else next(iter(value)),
)
def test_an_experiment_in_python_has_a_files_messages(changes, lines):
    """A line for each problem: the key, its value and the nearest known name. Nothing of pydantic's own."""
    tables = {**tomllib.loads(BASE), **changes}
    messages = set()
    for make in (lambda: Experiment(**tables), lambda: Experiment.model_validate(tables)):
        with pytest.raises(ConfigError) as error:
            make()
        messages.add(str(error.value))
    (message,) = messages
    assert len(message.splitlines()) == len(lines)
    for line, words in zip(message.splitlines(), lines, strict=True):
        assert line.startswith("Experiment: ")
        assert all(word in line for word in words)
    assert not re.search("pydantic|validation error|type=|input_value", message)


def test_an_experiment_in_python_that_is_valid_is_the_files(file):
    tables = tomllib.loads(BASE)
    assert Experiment(**tables) == Experiment.model_validate(tables) == Experiment.load(file)
    experiment = Experiment(**tables)
    assert Experiment.model_validate(experiment) is experiment
    assert Experiment(**{**tables, "model": experiment.model}) == experiment
    with pytest.raises(ConfigError, match="a table"):
        Experiment.model_validate(3)


JOB_FIELDS = sorted({*re.findall(r'JobError\(\s*"(\w+)"', inspect.getsource(job))})


@pytest.mark.parametrize("field", JOB_FIELDS)
def test_what_a_job_refuses_is_said_in_keys_of_the_file(field):
    """Each field that a job may refuse has its table, its remedy, and the split that the job names."""
    error = config_error(JobError(field, "= 9", "validation"))
    assert re.match(r"\[\w+\].* = 9; .+", str(error))
    if field in ("split", "privacy"):
        assert "data.validation_fraction" in str(error)
    others = str(config_error(JobError(field, "= 9", "validation"), unplaced=3))
    assert ("3 held-out rows belong to no client" in others) == (field == "split")
