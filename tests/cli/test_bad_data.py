"""Data and models that cannot be used: each ends a command with a message, and with no traceback.

No case trains anything. The tokenizer has a token for each byte.
"""

# ruff: noqa: E501 - one case a line
from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import save_file
from typer.testing import CliRunner

import prefed.core.huggingface
from prefed.core import Key
from prefed.models.tiny import make_tiny
from prefed.ui.cli import app
from preferences import tokenizer

FILE = """\
rounds = 1
[data]
train = "{train}"
partition = {{ by = "column", column = "client" }}
[model]
name = "{model}"
[method]
name = "feddpo"
"""

ROWS = [
    {"prompt": f"Q{k}:", "chosen": f" yes {k}", "rejected": f" no {k}", "client": "ab"[k % 2]}
    for k in range(12)
]


def rows(**changes: Any) -> list[dict[str, Any]]:
    """:data:`ROWS` with the second one changed; ``None`` in place of a value takes the column away."""
    changed = [dict(row) for row in ROWS]
    changed[1] |= changes
    return changed


def lines(items: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in items).encode()


def every(**changes: Any) -> bytes:
    return lines([row | changes for row in ROWS])


def without(*names: str) -> bytes:
    return lines([{name: value for name, value in row.items() if name not in names} for row in ROWS])


def table(path: Path, content: dict[str, list[Any]]) -> None:
    pq.write_table(pa.table(content), path)


COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
CSV = "prompt,chosen,rejected,client\n" + "".join(f"p{k}, a{k}, b{k},c{k % 2}\n" for k in range(12))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and no model."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path


def output(*command: str, code: int = 1) -> str:
    result = CliRunner().invoke(app, list(command))
    assert result.exit_code == code, f"{result.output}{result.exception!r}"
    assert "Traceback" not in result.output
    if code:
        assert isinstance(result.exception, SystemExit)
        assert result.stderr.startswith("error: ")
    return result.stderr if code else result.stdout


ROW = "train.jsonl, row 2: "
LINES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "train.jsonl: there are no rows; add some, or remove this source"),
    "UTF-16 without its mark": (lines(ROWS).decode().encode("utf-16-be"), 'UTF-16-BE text: set encoding = "utf-16-be"'),
    "UTF-32": (lines(ROWS).decode().encode("utf-32"), 'UTF-32 text: set encoding = "utf-32"'),
    "bytes of zero": (bytes(99), "train.jsonl: its first bytes indicate binary data, since it starts with zero bytes"),
    "a zip archive": (b"PK\x03\x04rest", "train.jsonl: its first bytes indicate a zip archive or an Excel workbook: unpack it"),
    "zstd": (b"\x28\xb5\x2f\xfdrest", "train.jsonl: its first bytes indicate a zstd file: unpack it"),
    "a line that is not JSON": (lines(ROWS[:1]) + b"{'a': 1}\n" + lines(ROWS), ROW + "not JSON: "),
    "no response": (without("rejected"), "train.jsonl, row 1: no known format has the columns prompt, chosen, client; use the columns prompt, chosen and rejected, or name yours"),
    "no response in one row": (lines([ROWS[0], {"prompt": "a", "chosen": "b", "client": "c"}]), ROW + "no column 'rejected'; available columns: prompt, chosen, client"),
    "null client": (lines(rows(client=None)), ROW + "no value in column 'client', which the partition requires"),
    "an image": (lines(rows(images=["a.png"])), ROW + "images changes what a model sees, but prefed trains on texts only"),
    "all for testing": (every(split="test"), "training pairs are left; usable pairs: 0 for validation, 12 for test"),
    "a partition column of another name": (lines([{**row, "clients": "a", "client": None} for row in ROWS]), "other columns: clients; did you mean 'clients'?"),
    "a fraction as client": (lines(rows(client=1.5)), ROW + "client must be a text or an integer, not 1.5"),
    "a number and text": (lines(rows(client=1) + rows(client="1")[1:]), "row 13: client is \"1\" here but 1 in row 2; both are read as '1', so write them the same way"),
    "a number and a whole one": (lines([ROWS[0] | {"client": 1}, ROWS[1] | {"client": 1.0}]), ROW + "client is 1.0 here but 1 in row 1; both are read as '1'"),
    "an escape in an id": (lines(rows(client="a\x1b[31m")), ROW + "client 'a\\x1b[31m' contains the control character U+001B"),
}  # fmt: skip


def experiment(place: Path, words: Path, train: str = "train.jsonl") -> None:
    (place / "exp.toml").write_text(FILE.format(train=train, model=words))


def test_json_lines_that_cannot_be_used(place: Path, words: Path, subtests: pytest.Subtests) -> None:
    for case, (content, message) in LINES.items():
        with subtests.test(case):
            (place / "train.jsonl").write_bytes(content)
            experiment(place, words)
            assert message in output("data", "exp.toml")


OTHERS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no such file": ("absent.jsonl", lambda path: None, "error: absent.jsonl: no such file or folder\n"),
    "a misspelt file": ("trian.jsonl", lambda path: path.with_name("train.jsonl").touch(), "trian.jsonl: no such file or folder; did you mean train.jsonl?"),
    "an unknown kind": ("train.txt", lambda path: path.touch(), "train.txt: unknown file type; supported types: .jsonl"),
    "an empty folder": ("train", lambda path: path.mkdir(), "train: no data files in this folder; supported types: .jsonl"),
    "an empty JSON list": ("train.json", lambda path: path.write_text("[]"), "train.json: there are no rows; add some, or remove this source"),
    "a CSV row too long": ("train.csv", lambda path: path.write_text(CSV + "p,a,b,c,d\n"), "train.csv, row 14: 5 fields, but the header has 4"),
    "a header alone": ("train.csv", lambda path: path.write_text(CSV.splitlines()[0]), "train.csv: there are no rows; add some, or remove this source"),
    "no header": ("train.csv", lambda path: path.write_text("".join(CSV.splitlines(True)[1:])), "train.csv, row 2: no known format has the columns p0"),
    "half a Parquet file": ("train.parquet", lambda path: (table(path, COLUMNS), path.write_bytes(path.read_bytes()[:-40])), "train.parquet, after row 0: incomplete Parquet file"),
    "Parquet of other columns": ("train.parquet", lambda path: table(path, {"text": ["a"]}), "train.parquet, row 1: no known format has the columns text; give two responses"),
}  # fmt: skip


def test_other_files_that_cannot_be_used(
    place: Path, words: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for case, (name, make, message) in OTHERS.items():
        with subtests.test(case):
            (place / case).mkdir()
            monkeypatch.chdir(place / case)
            make(place / case / name)
            experiment(place / case, words, name)
            assert message in output("data", "exp.toml")


SETTINGS: dict[str, tuple[list[str], str]] = {
    "no room": (["data.max_length=4"], "12: response longer than max_length = 4\nThe shortest of these long pairs needs max_length ="),
    "no room, and that is an error": (["data.max_length=4", "data.too_long=error"], "row 1: chosen has 7 tokens, but max_length is 4"),
    "nothing with the column": (["data.partition.column=worker", "data.invalid=drop"], "no row has the column 'worker' of [data.partition] column"),
    "a hub set without a network": (["data.train=nobody/nothing"], "could not load nobody/nothing (train) from the Hugging Face hub: no answer (or HF_HUB_OFFLINE is set), and the dataset is not in"),
    "a model folder that is empty": (["model.name=empty"], "empty': the folder is empty; give one with config.json, weights and tokenizer"),
    "a model folder without a tokenizer": (["model.name=other"], "other': the folder has no config.json, no weights, no tokenizer"),
    "a hub model without a network": (["model.name=nobody/nothing"], "[model] name = 'nobody/nothing': the Hugging Face hub is not reachable"),
}  # fmt: skip


def test_settings_that_do_not_suit_the_data(
    place: Path, words: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    (place / "train.jsonl").write_bytes(lines(ROWS))
    (place / "empty").mkdir()
    (place / "other").mkdir()
    (place / "other/notes.txt").touch()
    monkeypatch.setattr(prefed.core.huggingface, "_answers", lambda endpoint: False)
    experiment(place, words)
    for case, (overrides, message) in SETTINGS.items():
        with subtests.test(case):
            options = [word for override in overrides for word in ("--set", override)]
            assert message in output("data", "exp.toml", *options)


USABLE = {
    "a byte order mark": (b"\xef\xbb\xbf" + lines(ROWS), "2 clients"),
    "line ends of Windows": (lines(ROWS).replace(b"\n", b"\r\n"), "2 clients"),
    "gzip under a plain name": (gzip.compress(lines(ROWS)), "2 clients"),
    "one client": (every(client="a"), "1 client  "),
    "a client with one pair": (lines(rows(client="once")), "once"),
    "an empty prompt": (lines(rows(prompt="")), "2 clients"),
    "paths as ids": (lines(rows(client="../../etc/passwd")), "../../etc/passwd"),
    "a long id": (lines(rows(client="x" * 5000)), "3 clients"),
    "ids that look alike": (lines(rows(client="\u0430")), "3 clients"),
    "ids in other scripts": (lines(rows(client="安娜 ミナ")), "安娜 ミナ"),
    "markup in ids": (lines(rows(client="[red]x[/] $\\alpha$")), "[red]x[/] $\\alpha$"),
    "a number as every id": (every(client=7), "7"),
}


def test_what_is_unusual_and_can_be_used(place: Path, words: Path, subtests: pytest.Subtests) -> None:
    for case, (content, shown) in USABLE.items():
        with subtests.test(case):
            (place / "train.jsonl").write_bytes(content)
            experiment(place, words)
            assert shown in output("data", "exp.toml", code=0)


def test_a_data_file_needs_no_experiment(place: Path, words: Path) -> None:
    """Clients are the values of `client`, else the files of a folder. `--json` has the same tokens."""
    (place / "rows.jsonl").write_bytes(lines(ROWS))
    assert "name the model whose tokenizer reads them with --set model.name" in output("data", "rows.jsonl")
    assert "rows.jsonl is a data file; name it as [data] train" in output("run", "rows.jsonl")
    for content in (lines(ROWS), b"\x28\xb5\x2f\xfd"):
        (place / "rows.txt").write_bytes(content)
        assert "if it contains data, its name must end in one of .jsonl, .nd" in output("data", "rows.txt")
    command = ["data", "rows.jsonl", "--set", f"model.name={words}", "--show", "1"]
    text = output(*command, code=0)
    assert "a: 1 of 5 training rows" in text
    assert "prompt     Q2:\n    chosen     {{ yes 2[[<eos>]]}}" in text
    first = json.loads(output(*command, "--json", code=0))["shown"][0]
    assert (first["id"], first["train"], first["pairs"][0]["row"]) == ("a", 5, 3)
    chosen = first["pairs"][0]["parts"][1]
    assert chosen["pieces"] == [
        {"text": " yes 2", "scored": True},
        {"text": "<eos>", "special": True, "scored": True},
    ]
    assert chosen["ids"][-1] == 0
    (place / "both").mkdir()
    for name in ("ann", "ben"):
        (place / f"both/{name}.jsonl").write_bytes(without("client"))
    text = output("data", "both", "--set", f"model.name={words}", code=0)
    assert all(name in text for name in ("ann", "ben"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [row["prompt"] + row["chosen"] for row in ROWS]
    return make_tiny(
        tmp_path_factory.mktemp("model") / "tiny", texts, Key(0), layers=1, width=8, heads=2, steps=1
    )


def config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def unlike(folder: Path) -> None:
    """The weights have another width than the configuration."""
    save_file({"transformer.wte.weight": torch.zeros(3, 3)}, folder / "model.safetensors", {"format": "pt"})


def sequence_to_sequence(folder: Path) -> None:
    small = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4, "vocab_size": 300}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**small)).save_pretrained(folder)


MODELS: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), [], "the folder has no weights;"),
    "half the weights": (lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-99]), [], "cannot load a causal language model: "),
    "weights that are text": (lambda folder: (folder / "model.safetensors").write_text("weights"), [], "cannot load a causal language model: "),
    "weights of another shape": (unlike, [], "cannot load a causal language model: "),
    "no config": (lambda folder: (folder / "config.json").unlink(), [], "the folder has no config.json;"),
    "a config that is not JSON": (lambda folder: (folder / "config.json").write_text("{"), [], "cannot load a "),
    "an unknown kind of model": (lambda folder: config(folder, model_type="nobodys"), [], "cannot load a "),
    "a tokenizer that is not JSON": (lambda folder: (folder / "tokenizer.json").write_text("{"), [], "cannot load a tokenizer: "),
    "no causal model": (sequence_to_sequence, [], "cannot load a causal language model: "),
    "targets that are not there": (lambda folder: None, ["model.lora.targets=['q_proj']"], "[model.lora] targets = ['q_proj']: "),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "overrides", "message"), MODELS.values(), ids=MODELS)
def test_models_that_cannot_be_used(
    place: Path, model: Path, damage: Callable[[Path], object], overrides: list[str], message: str
) -> None:
    """Each message names the key and the folder."""
    folder = place / "model"
    shutil.copytree(model, folder)
    damage(folder)
    (place / "train.jsonl").write_bytes(lines(ROWS))
    experiment(place, folder)
    options = [word for override in overrides for word in ("--set", override)]
    text = output("run", "exp.toml", *options, "--out", "out")
    assert message in text
    assert "[model" in text
    assert len(text) < 1200
