import tomllib

import pytest
from pydantic import ValidationError

from prefed.data import DataConfig
from prefed.data.config import BySource, Conflict, Dirichlet

IID = {"by": "iid", "clients": 2}


def test_reads_the_documented_table():
    """The example on the page of the experiment file, value by value."""
    table = tomllib.loads(
        'train = "personas.train.jsonl.gz"\ntest = "personas.test.jsonl.gz"\n'
        'partition = { by = "column", column = "persona" }'
    )
    config = DataConfig(**table)
    assert [(role, name, source.path) for role, name, source in config.sources()] == [
        ("train", None, "personas.train.jsonl.gz"),
        ("test", None, "personas.test.jsonl.gz"),
    ]
    assert config.partition.column == "persona"
    assert (config.max_length, config.duplicates, config.invalid, config.too_long) == (
        512,
        "drop",
        "error",
        "drop",
    )


def test_a_table_of_sources_is_one_client_each():
    config = DataConfig(
        train={"web": "openai/webgpt_comparisons", "code": {"path": "code.csv", "columns": {"prompt": "q"}}},
        test={"web": "t.jsonl"},
    )
    assert isinstance(config.partition, BySource)
    assert [name for role, name, _ in config.sources()] == ["web", "code", "web"]


def test_a_list_of_sources_is_named_after_its_files():
    assert set(DataConfig(train=["a/one.jsonl.gz", "b/two.csv"]).train) == {"one", "two"}
    with pytest.raises(
        ValidationError,
        match="sources in a list are named after their files, and two names are equal; use a table",
    ):
        DataConfig(train=["a/one.jsonl", "b/one.csv"])


def test_refuses(subtests):
    for change, message in (
        ({"partition": None}, r'set partition, e\.g\. to \{by = "iid", clients = 10\}'),
        ({"partition": {"by": "random"}}, "iid"),
        ({"partition": {"by": "source"}}, "requires train = {name"),
        ({"partition": {"by": "conflict", "clients": 4}}, "either column"),
        ({"partition": {"by": "conflict", "clients": 4, "flip": True, "column": "c"}}, "either column"),
        ({"partition": {"by": "conflict", "clients": 4, "flip": True, "ratio": 1}}, "less than 1"),
        ({"partition": {"by": "dirichlet", "clients": 4, "alpha": 0}}, "greater than 0"),
        ({"partition": {"by": "iid", "clients": 2, "size": 1}}, "Extra inputs"),
        ({"test": "t.jsonl", "test_fraction": 0.1}, "test.*test_fraction"),
        ({"validation": "t.jsonl", "validation_fraction": 0.1}, "validation.*validation_fraction"),
        (
            {"validation_fraction": 0.6, "test_fraction": 0.4},
            "the sum of validation_fraction and test_fraction must be less than 1",
        ),
        ({"max_length": 1}, "greater than or equal to 2"),
        ({"train": {}}, "the table of sources is empty"),
        ({"tests": "t.jsonl"}, "Extra inputs"),
    ):
        with subtests.test(change=change), pytest.raises(ValidationError, match=message):
            DataConfig(**({"train": "x.jsonl", "partition": IID} | change))


def test_tables_of_other_roles_name_the_same_clients():
    with pytest.raises(ValidationError, match="must be a table with names of clients in train"):
        DataConfig(train={"a": "a.csv"}, test={"b": "b.csv"})
    with pytest.raises(ValidationError, match="must be a table with names of clients in train"):
        DataConfig(train={"a": "a.csv"}, test="b.csv")


def test_survives_its_own_dump():
    for partition in (
        IID | {"sizes": 1.5},
        IID | {"sizes": [1, 2]},
        Dirichlet(clients=3),
        Conflict(clients=4, column="kind", categories=("helpful", "harmless")),
        {"by": "column", "column": "lang", "groups": {"web": ["js", "php"], "sys": ["c"]}},
    ):
        config = DataConfig(train={"a": "a.csv", "b": "b.csv"}, partition=partition)
        assert DataConfig(**config.model_dump(mode="json")) == config
