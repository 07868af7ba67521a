import itertools
import tracemalloc

import numpy as np
import pytest

from prefed.core import Key
from prefed.data import DataConfig, DataError, FederatedDataset, build_dataset
from prefed.data.partition import ROLES
from preferences import jsonl, pairs, tokenizer

IID = {"by": "iid", "clients": 3}
BY_WORKER = {"by": "column", "column": "worker"}


@pytest.fixture
def build(tmp_path):
    """Builds a dataset of rows of the given roles under the settings, each time in a new folder."""
    counter = itertools.count()

    def build(train, *, seed=0, made=None, **settings):
        here = tmp_path / f"data{next(counter)}"
        here.mkdir()
        for role in ("validation", "test"):
            if role in settings and not isinstance(settings[role], str | dict):
                settings[role] = str(jsonl(here / f"{role}.jsonl", settings[role]))
        if not isinstance(train, str | dict):
            train = str(jsonl(here / "train.jsonl", train))
        config = DataConfig(**({"train": train, "partition": IID} | settings))
        return build_dataset(config, made or tokenizer(), Key(seed), here / "tokens")

    return build


def prompts(dataset):
    """Every client's prompts by role."""
    return {
        name: {role: [dataset.tokens.record(k).prompt for k in getattr(data, role)] for role in ROLES}
        for name, data in dataset.clients.items()
    }


def test_every_row_is_held_once(build):
    """40 rows over 3 clients, a tenth to test on: all 40 in exactly one place."""
    dataset = build(pairs(40), validation_fraction=0.2)
    rows = np.concatenate([np.concatenate([d.train, d.validation, d.test]) for d in dataset.clients.values()])
    assert sorted(rows) == list(range(40))
    assert dataset.row_counts.kept == dataset.row_counts.read == 40
    sizes = [(len(d.train), len(d.validation), len(d.test)) for d in dataset.clients.values()]
    # 14, 13 and 13 rows: round(1.4) = 1 and round(1.3) = 1 to test, round(2.8) = round(2.6) = 3 to choose by.
    assert sizes == [(10, 3, 1), (9, 3, 1), (9, 3, 1)]
    for data in dataset.clients.values():
        for part in (data.train, data.validation, data.test):
            assert part.dtype == np.int64
            assert (np.diff(part) > 0).all()


def test_a_test_file_goes_to_its_clients(build):
    rows = pairs(6, worker=lambda k: k % 2)
    test = [dict(row, prompt="T" + row["prompt"]) for row in pairs(4, worker=lambda k: k % 4)]
    dataset = build(rows, partition=BY_WORKER, test=test)
    assert prompts(dataset) == {
        "0": {"train": ["Q0:", "Q2:", "Q4:"], "validation": [], "test": ["TQ0:"]},
        "1": {"train": ["Q1:", "Q3:", "Q5:"], "validation": [], "test": ["TQ1:"]},
    }
    # Workers 2 and 3 are tested on but train on nothing.
    assert dataset.row_counts.unplaced == 2


def test_a_split_column_is_followed(build):
    rows = pairs(6, worker="w", split=lambda k: ["train", "valid", "test"][k % 3])
    dataset = build(rows, partition=BY_WORKER)
    assert prompts(dataset)["w"] == {
        "train": ["Q0:", "Q3:"],
        "validation": ["Q1:", "Q4:"],
        "test": ["Q2:", "Q5:"],
    }
    with pytest.raises(DataError, match=r"already contain validation or test pairs"):
        build(rows, partition=BY_WORKER, test_fraction=0.5)


def test_a_client_with_one_pair_trains_on_it(build):
    dataset = build(
        pairs(3, worker=lambda k: k), partition=BY_WORKER, test_fraction=0.5, validation_fraction=0.4
    )
    assert [len(d.train) for d in dataset.clients.values()] == [1, 1, 1]
    assert [len(d.test) + len(d.validation) for d in dataset.clients.values()] == [0, 0, 0]


def test_limit_keeps_some_of_the_training_pairs(build):
    """The same pairs are tested on with and without a limit."""
    rows = pairs(60)
    whole, limited = build(rows), build(rows, limit=5)
    for name, data in limited.clients.items():
        assert len(data.train) == 5
        assert set(data.train) <= set(whole.clients[name].train)
        assert data.test.tolist() == whole.clients[name].test.tolist()
    assert limited.row_counts.limited == 60 - 6 - 15


def test_a_limit_draws_pairs_anew_with_each_seed(build):
    """One of a worker's four pairs, with 40 seeds: each of the four comes, but for one case in 4 · 0.75⁴⁰ =
    25,000, and with the same seed the same one. The first rows of a file are no sample of it."""
    rows = pairs(4, worker="w")
    settings = {"partition": BY_WORKER, "test_fraction": 0.0, "limit": 1}
    drawn = [build(rows, seed=seed, **settings).clients["w"].train.tolist() for seed in range(40)]
    assert {row for (row,) in drawn} == {0, 1, 2, 3}
    assert build(rows, seed=7, **settings).clients["w"].train.tolist() == drawn[7]


class TestDuplicates:
    rows = (*pairs(10), *pairs(4))

    def test_kept_on_one_side(self, build):
        """Copies of a pair are never in two splits of a client."""
        dataset = build(
            pairs(5) * 8, partition={"by": "iid", "clients": 1}, duplicates="keep", test_fraction=0.4
        )
        (data,) = dataset.clients.values()
        of = dataset.tokens.pairs
        assert not set(of[data.train].tolist()) & set(of[data.test].tolist())
        assert (len(data.train), len(data.test)) == (24, 16)

    def test_refused(self, build):
        with pytest.raises(DataError, match=r"train.jsonl, row 11: repeats an earlier pair"):
            build(self.rows, duplicates="error")

    def test_of_other_people_are_their_own(self, build):
        """Two annotators who judge the same pair both count; one who judges it twice counts once."""
        rows = [*pairs(4, worker="a"), *pairs(4, worker="b"), *pairs(2, worker="a")]
        assert build(rows, partition=BY_WORKER).row_counts.duplicates == 2


def test_what_is_tested_on_is_not_trained_on(build):
    """Also where the test file has the pair the other way round."""
    rows = pairs(6)
    mirror = rows[1] | {"chosen": rows[1]["rejected"], "rejected": rows[1]["chosen"]}
    dataset = build(rows, partition={"by": "iid", "clients": 1}, test=[rows[0], mirror])
    assert dataset.row_counts.leaks == 2
    assert prompts(dataset)["client-0"]["train"] == ["Q2:", "Q3:", "Q4:", "Q5:"]
    assert len(prompts(dataset)["client-0"]["test"]) == 2


@pytest.mark.parametrize("limit", [None, 12])
def test_what_anybody_is_tested_on_nobody_trains_on_when_asked(build, limit):
    """Three workers hold the same 40 pairs, and each draws its own 4 to test on and 8 to choose by. Oracle:
    the draws of ``drop``, less what stands in a later role with anybody; of what is left each keeps 12."""
    rows = [row for name in "abc" for row in pairs(40, worker=name)]
    given = {"partition": BY_WORKER, "validation_fraction": 0.2}
    before, row_counts = prompts(build(rows, **given)), build(rows, **given).row_counts
    tested = {prompt for roles in before.values() for prompt in roles["test"]}
    chosen_by = {prompt for roles in before.values() for prompt in roles["validation"]}
    assert any(tested & set(roles["train"]) for roles in before.values())
    expected = {
        name: {
            "train": [p for p in roles["train"] if p not in tested | chosen_by],
            "validation": [p for p in roles["validation"] if p not in tested],
            "test": roles["test"],
        }
        for name, roles in before.items()
    }
    left = sum(len(texts) for roles in expected.values() for texts in roles.values())
    dataset = build(rows, duplicates="drop_tested", limit=limit, **given)
    prompts_of = prompts(dataset)
    assert (row_counts.leaks, dataset.row_counts.leaks) == (0, 120 - left)
    for name, roles in prompts_of.items():
        assert roles["test"] == expected[name]["test"]
        assert roles["validation"] == expected[name]["validation"]
        assert set(roles["train"]) <= set(expected[name]["train"])
        assert len(roles["train"]) == min(len(expected[name]["train"]), limit or 40)


def test_if_every_pair_is_tested_on_elsewhere_nobody_is_left(build):
    first, second = pairs(2)
    rows = [first | {"worker": "a"}, second | {"worker": "b"}]
    test = [second | {"worker": "a"}, first | {"worker": "b"}]
    assert len(build(rows, partition=BY_WORKER, test=test).clients) == 2
    with pytest.raises(DataError, match=r"no training pairs are left: .* also test pairs; set \[data\]"):
        build(rows, partition=BY_WORKER, test=test, duplicates="drop_tested")


def test_a_client_of_whom_nothing_is_left_is_dropped(build):
    rows = pairs(3, worker=lambda k: "ab"[k == 0])
    dataset = build(rows, partition=BY_WORKER, test=[rows[0]])
    assert list(dataset.clients) == ["a"]


def test_prompts_stay_on_one_side_when_asked(build):
    rows = [{"prompt": f"Q{k % 6}", "chosen": f"a{k}", "rejected": "b"} for k in range(60)]
    dataset = build(rows, split_by="prompt", test_fraction=0.3, partition={"by": "iid", "clients": 1})
    (parts,) = prompts(dataset).values()
    assert set(parts["test"])
    assert not set(parts["test"]) & set(parts["train"])


def test_one_data_set_per_client(build, tmp_path):
    """A set with no test table of its own gives a tenth of its pairs; names are domains too."""
    web = str(jsonl(tmp_path / "web.jsonl", pairs(10)))
    code = str(jsonl(tmp_path / "code.jsonl", pairs(20)))
    tests = str(jsonl(tmp_path / "t.jsonl", [dict(row, prompt="T") for row in pairs(3)]))
    dataset = build({"web": web, "code": code}, partition={"by": "source"}, test={"web": tests})
    assert list(dataset.clients) == ["web", "code"]
    assert {n: (len(d.train), len(d.test)) for n, d in dataset.clients.items()} == {
        "web": (10, 3),
        "code": (18, 2),
    }
    assert dataset.tokens.record(int(dataset.clients["code"].train[0])).domain == "code"


def test_flipped_clients(build):
    """Named clients see chosen and rejected swapped, in training and in test; a double flip is none."""
    dataset = build(pairs(30), flip=["client-1"])
    assert dataset.flipped == {"client-1"}
    for name, data in dataset.clients.items():
        for row in (*data.train, *data.test):
            swapped = dataset.tokens.record(int(row)).chosen.startswith(" no")
            assert swapped == (name == "client-1")
    conflict = {"by": "conflict", "clients": 4, "ratio": 0.5, "flip": True}
    both = build(pairs(40), partition=conflict, flip=["reversed-0"])
    assert both.flipped == {"reversed-1"}
    with pytest.raises(DataError, match=r"'client-9'; did you mean 'client-2'\?"):
        build(pairs(30), flip=["client-9"])


class TestFolder:
    def config(self, tmp_path, rows=20, **settings):
        jsonl(tmp_path / "train.jsonl", pairs(rows))
        return DataConfig(**({"train": str(tmp_path / "train.jsonl"), "partition": IID} | settings))

    def test_an_equal_call_opens_what_is_there(self, tmp_path):
        """The second call reads no source: they may not even be of the same name."""
        config = self.config(tmp_path)
        first = build_dataset(config, tokenizer(), Key(0), tmp_path / "t")
        stamp = (tmp_path / "t" / "ids.i32").stat().st_mtime_ns
        again = build_dataset(config, tokenizer(), Key(0), tmp_path / "t")
        assert again.fingerprint == first.fingerprint
        assert (tmp_path / "t" / "ids.i32").stat().st_mtime_ns == stamp
        opened = FederatedDataset.open(tmp_path / "t")
        assert prompts(opened) == prompts(first)
        assert (opened.row_counts, opened.fingerprint) == (first.row_counts, first.fingerprint)

    def test_the_same_anywhere(self, tmp_path, monkeypatch):
        """Another folder, a relative path instead of an absolute one: the same fingerprint."""
        config = self.config(tmp_path)
        first = build_dataset(config, tokenizer(), Key(0), tmp_path / "t")
        monkeypatch.chdir(tmp_path)
        relative = DataConfig(train="train.jsonl", partition=IID)
        assert build_dataset(relative, tokenizer(), Key(0), tmp_path / "u").fingerprint == first.fingerprint
        assert build_dataset(relative, tokenizer(), Key(0), tmp_path / "t").fingerprint == first.fingerprint

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"limit": 3}, "settings"),
            ({"rows": 21}, "source files"),
            ({"seed": 1}, "seed"),
            ({"bos": True}, "tokenizer"),
        ],
    )
    def test_other_inputs_are_refused(self, tmp_path, change, message):
        build_dataset(self.config(tmp_path), tokenizer(), Key(0), tmp_path / "t")
        settings = {"limit": change["limit"]} if "limit" in change else {}
        config = self.config(tmp_path, change.get("rows", 20), **settings)
        with pytest.raises(
            DataError, match=f"t contains data prepared from different {message}; use another folder"
        ):
            build_dataset(config, tokenizer(bos="bos" in change), Key(change.get("seed", 0)), tmp_path / "t")

    def test_a_failure_leaves_nothing(self, tmp_path):
        config = self.config(tmp_path, partition={"by": "iid", "clients": 30})
        with pytest.raises(DataError, match="20 pairs are too few for 30 clients; use fewer clients"):
            build_dataset(config, tokenizer(), Key(0), tmp_path / "t")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["train.jsonl"]

    def test_the_leavings_of_a_killed_build_are_cleared(self, tmp_path):
        config = self.config(tmp_path)
        (tmp_path / "t.partial").mkdir()
        (tmp_path / "t.partial" / "ids.i32").write_bytes(b"half")
        dataset = build_dataset(config, tokenizer(), Key(0), tmp_path / "t")
        assert len(dataset.tokens) == 20
        assert not (tmp_path / "t.partial").exists()

    def test_a_folder_with_something_else_is_left_alone(self, tmp_path):
        (tmp_path / "t").mkdir()
        (tmp_path / "t" / "thesis.txt").write_text("mine")
        with pytest.raises(DataError, match="cannot write"):
            build_dataset(self.config(tmp_path), tokenizer(), Key(0), tmp_path / "t")
        assert (tmp_path / "t" / "thesis.txt").read_text() == "mine"

    def test_damage_is_named(self, tmp_path):
        build_dataset(self.config(tmp_path), tokenizer(), Key(0), tmp_path / "t")
        (tmp_path / "t" / "bounds.i64").write_bytes(b"123")
        with pytest.raises(DataError, match="delete it to rebuild it"):
            FederatedDataset.open(tmp_path / "t")


def test_the_seed_decides_the_deal(build):
    rows = pairs(30)
    first, same, other = build(rows), build(rows), build(rows, seed=1)
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert first.tokens.fingerprint == other.tokens.fingerprint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"partition": BY_WORKER},
            r"rows 1 to 10: no row has the column 'worker' of \[data\.partition\] column; "
            "other columns: score; set it to the one that names the client, add the column, or shuffle the "
            r"rows: \[data\] partition = "
            '{by = "iid", clients = 10}$',
        ),
        ({"partition": {"by": "margin", "clients": 2}}, r"rows 1 to 10: no row has the column 'margin'"),
        ({"template": "chat"}, "the tokenizer has no chat template"),
    ],
)
def test_what_cannot_be_divided_is_named(build, settings, message):
    with pytest.raises(DataError, match=message):
        build(pairs(10, score=1), **settings)


def test_row_counts_add_up(build):
    """14 rows: 1 blank, 1 of equal responses, 1 too long, 1 repeat, and 10 that are held."""
    rows = [
        *pairs(10),
        {"prompt": "Q", "chosen": " ", "rejected": "b"},
        {"prompt": "Q", "chosen": "b", "rejected": "b"},
        {"prompt": "Q", "chosen": "x" * 600, "rejected": "b"},
        pairs(1)[0],
    ]
    counts = build(rows, invalid="drop").row_counts
    numbers = (counts.read, counts.invalid, counts.identical, counts.too_long, counts.duplicates, counts.kept)
    assert numbers == (14, 1, 1, 1, 1, 10)


@pytest.mark.rare
def test_memory_hardly_grows_with_rows(tmp_path):
    """Peak traced memory of 2,000 more rows in 500 more clients: below 200 bytes a row.

    Texts and tokens, some 300 bytes a row here, are on disk alone.
    """
    peaks = {}
    # The first build also pays for imports and caches.
    for rows in (300, 500, 2500):
        path = jsonl(
            tmp_path / f"{rows}.jsonl",
            (dict(row, prompt=row["prompt"] + "x" * 20) for row in pairs(rows, worker=lambda k: k // 4)),
        )
        config = DataConfig(train=str(path), partition=BY_WORKER)
        made = tokenizer()
        tracemalloc.start()
        dataset = build_dataset(config, made, Key(0), tmp_path / f"t{rows}")
        peaks[rows] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(dataset.clients) == rows // 4
    assert (peaks[2500] - peaks[500]) / 2000 < 200
    on_disk = sum((tmp_path / "t2500" / name).stat().st_size for name in ("ids.i32", "records.jsonl"))
    assert on_disk / 2500 > 250
