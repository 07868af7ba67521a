import pytest
from pydantic import ValidationError

from prefed.data import DataConfig

IID = {"by": "iid", "clients": 2}


def test_a_list_of_sources_is_named_after_its_files():
    assert set(DataConfig(train=["a/one.jsonl.gz", "b/two.csv"]).train) == {"one", "two"}
    with pytest.raises(ValidationError, match="sources in a list are named after their files, and two names"):
        DataConfig(train=["a/one.jsonl", "b/one.csv"])


def test_refuses(subtests):
    for change, message in (
        ({"partition": None}, r'set partition, e\.g\. to \{by = "iid", clients = 10\}'),
        ({"partition": {"by": "random"}}, "iid"),
        ({"partition": {"by": "source"}}, "requires train = {name"),
        ({"partition": {"by": "conflict", "clients": 4}}, "either column"),
        ({"partition": {"by": "conflict", "clients": 4, "flip": True, "column": "c"}}, "either column"),
        ({"partition": {"by": "conflict", "clients": 4, "flip": True, "ratio": 1}}, "less than 1"),
        ({"partition": {"by": "iid", "clients": 2, "size": 1}}, "Extra inputs"),
        ({"test": "t.jsonl", "test_fraction": 0.1}, "test.*test_fraction"),
        ({"validation": "t.jsonl", "validation_fraction": 0.1}, "validation.*validation_fraction"),
        ({"validation_fraction": 0.6, "test_fraction": 0.4}, "the sum of validation_fraction"),
    ):
        with subtests.test(change=change), pytest.raises(ValidationError, match=message):
            DataConfig(**({"train": "x.jsonl", "partition": IID} | change))


def test_tables_of_other_roles_name_the_same_clients():
    with pytest.raises(ValidationError, match="must be a table with names of clients in train"):
        DataConfig(train={"a": "a.csv"}, test={"b": "b.csv"})
    with pytest.raises(ValidationError, match="must be a table with names of clients in train"):
        DataConfig(train={"a": "a.csv"}, test="b.csv")
