"""Win rates, an alignment and responses side by side on a run's page, from files written by hand."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from finished import write_run
from prefed.runs.finished_run import EXAMPLES, Outcome, RunError, alignment_of, judged_of, read_run
from prefed.ui.pages.outcomes import (
    epochs_table,
    generation_answers,
    generations_chart,
)
from prefed.ui.pages.page import render, write_page

SUMMARY = {
    "name": "n",
    "judge": "reward:model",
    "model": "feddpo",
    "against": "base",
    "prompts": 10,
    "win_rate": {"mean": 0.625, "low": 0.5, "high": 0.75},
    "wins": 0.5,
    "length_controlled": None,
    "ties": 2,
    "judged": 8,
    "failed": 1,
    "left_out": 1,
    "note": "1 prompt has no usable verdict",
}
ALIGNED = {
    "prompts": {"read": 12, "clients": 2, "duplicates": 1, "kept": 9, "seconds": 0.1},
    "policy": {"seconds": 0.1},
    "completions": {"completions": 18, "tokens": 99, "too_long": 0, "tokens_per_second": 1.0},
    "labels": {
        **{"pairs": 9, "identical": 2, "blank": 0, "too_long": 0, "ties": 1, "unanimous": 4},
        "labelled": 6,
    },
    "train": {
        **{"pairs": 5, "held_out": 1, "too_long": 0, "kept": 2},
        "epochs": [
            {"epoch": 1, "loss": 0.6931, "steps": 2, "agreement": 0.5, "margin": 0.0},
            {"epoch": 2, "loss": 0.5, "steps": 2, "agreement": 1.0, "margin": 0.1},
        ],
    },
    "seconds": 3.0,
}


def verdict(row: int, **changes: Any) -> dict[str, Any]:
    base = {"row": row, "prompt": f"prompt {row}", "text": f"ours {row}", "against": f"theirs {row}"}
    return {**base, "outcome": 1, "result": "win", **changes}


def lines(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def judged_run(path: Path, *verdicts: dict[str, Any], **changes: Any) -> Path:
    write_run(path)
    lines(path / "judge/n/verdicts.jsonl", *(verdicts or (verdict(1),)))
    (path / "judge/n/summary.json").write_text(json.dumps({**SUMMARY, **changes}))
    return path


@pytest.mark.parametrize(
    ("each", "first"),
    [(1, ["1", "2 (kept)"]), (2, ["1, epoch 1", "1, epoch 2 (kept)", "2, epoch 1", "2, epoch 2"])],
)
def test_the_rows_of_a_policy_with_tastes_are_generations(each: int, first: list[str]) -> None:
    """Epochs are numbered over all generations in the file, and within their generation in the table. The
    win rate and the health of text are of the epochs that answered held-out prompts; the first row is the
    initial policy's."""
    epochs = [
        {"epoch": k + 1, "generation": k // each + 1, "loss": 0.5, "steps": 2, "agreement": 0.5}
        for k in range(2 * each)
    ]
    base, own = {"ends": 0.25, "loops": 0.5}, {"ends": 1.0, "loops": 0.125}
    epochs[1] |= {"win_rate": 0.75, "kl": 0.25, "text": {"base": base, "shared": own}}
    table = epochs_table(Outcome({"train": {"epochs": epochs, "kept": 2}}, ()))
    assert table.heads == ["generation", "loss", "agreement", "win rate", "KL", "end", "loop"]
    assert [name for name, _ in table.rows] == ["initial policy", *first]
    assert table.rows[0][1] == ["", "", "", "", "25%", "50%"]
    assert table.rows[1][1] == ["0.5000", "0.500", "", "", "", ""]
    assert table.rows[2][1] == ["0.5000", "0.500", "75.0%", "0.25", "100%", "12%"]


def loop(generations: int) -> dict[str, object]:
    """The summary of a loop: two epochs in a generation, and a refresh before the second."""
    base, own = {"ends": 0.25, "loops": 0.5}, {"ends": 1.0, "loops": 0.125}
    epochs = [
        {
            "epoch": k,
            "generation": (k + 1) // 2,
            "loss": 0.5,
            "agreement": 0.5,
            "win_rate": k / 8,
            "kl": k / 4,
        }
        | {"text": {"base": base, "shared": own}}
        for k in range(1, 2 * generations + 1)
    ]
    refreshes = [{"generation": 2, "accuracy": 0.625}]
    return {"train": {"epochs": epochs, "kept": 1}, "refresh": {"refreshes": refreshes}}


def test_a_loop_is_drawn_by_generation(tmp_path: Path) -> None:
    """The last epoch of each counts; accuracy is there where clients judged; KL has its own scale."""
    chart = generations_chart(Outcome(loop(2), ()))
    assert chart is not None
    shares, kl = chart.panels
    assert {line.name: list(line.points) for line in shares.shown} == {
        "win rate": [(1.0, 0.25), (2.0, 0.5)],
        "answers that end": [(1.0, 1.0), (2.0, 1.0)],
        "that loop": [(1.0, 0.125), (2.0, 0.125)],
        "selectors' accuracy": [(2.0, 0.625)],
    }
    assert [list(line.points) for line in kl.shown] == [[(1.0, 0.5), (2.0, 1.0)]]
    assert generations_chart(Outcome(loop(1), ())) is None


def test_a_page_has_each_generations_answers(tmp_path: Path) -> None:
    """Next to the initial policy's, for every prompt in the file."""
    path = write_run(tmp_path / "run")
    (path / "align").mkdir()
    train = {**ALIGNED["train"], **loop(2)["train"]}  # type: ignore[dict-item]
    (path / "align/summary.json").write_text(json.dumps({**ALIGNED, "train": train}))
    row = {"prompt": [{"role": "user", "content": "Why?"}], "answers": ["So so.", "Just so.", "Quite so."]}
    (path / "align/answers.jsonl").write_text(json.dumps(row) + "\n")
    outcome = alignment_of(path)
    assert outcome is not None
    (examples,) = generation_answers(outcome)
    assert examples.heads == ["initial policy", "generation 1", "generation 2"]
    assert examples.rows == [("user: Why?", row["answers"], "")]
    page = render(read_run(path))
    assert page.index("So so.") < page.index("Just so.") < page.index("Quite so.")


def test_a_page_has_the_win_rate_its_interval_and_its_note(tmp_path: Path) -> None:
    page = re.sub(r"</?t[hd][^>]*>", "|", render(read_run(judged_run(tmp_path / "run"))))
    row = "|feddpo against base||reward:model||62.5%||50.0% to 75.0%||50.0%||8||2||1|||"
    assert row in page
    assert "feddpo against base: 1 prompt has no usable verdict." in page
    for text in ("prompt 1", "ours 1", "theirs 1", "Prompt 1 · win"):
        assert text in page


def test_the_first_prompts_are_shown_and_the_last_verdict_of_each_counts(tmp_path: Path) -> None:
    """The rows stand in the order of judging: ties without a question first, repeats later."""
    rows = [verdict(6), verdict(9), *(verdict(k) for k in (5, 1, 4, 3, 2)), verdict(3, result="loss")]
    (judged,) = judged_of(read_run(judged_run(tmp_path / "run", *rows)))
    assert [each.prompt for each in judged.examples] == [f"prompt {k}" for k in range(1, EXAMPLES + 1)]
    assert [each.outcome for each in judged.examples] == ["win", "win", "loss", "win"]


def test_texts_are_escaped_and_capped(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "<b>hi</b>"}, {"role": "assistant", "content": "yes\x1b[2J"}]
    rows = [verdict(1, prompt=turns, text="<script>x</script>" + "a" * 5000, against="")]
    page = render(read_run(judged_run(tmp_path / "run", *rows)))
    assert "user: &lt;b&gt;hi&lt;/b&gt;\n\nassistant: yes\\x1b[2J" in page
    assert page.count("<script") == 1
    assert "a" * 670 in page
    assert "a" * 700 not in page
    assert "(no text)" in page


def test_a_page_that_quotes_a_judge_is_its_owners(tmp_path: Path) -> None:
    path = judged_run(tmp_path / "run")
    write_page(read_run(path), tmp_path / "a.html")
    write_page(read_run(write_run(tmp_path / "other")), tmp_path / "b.html")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.html", "b.html")]
    umask = os.umask(0)
    os.umask(umask)
    assert modes == [0o600, 0o666 & ~umask]


def test_a_comparison_under_way_is_none(tmp_path: Path) -> None:
    """A line without an end is being written; a folder without a summary has not come to its end."""
    path = judged_run(tmp_path / "run")
    with (path / "judge/n/verdicts.jsonl").open("a") as file:
        file.write('{"row": 2, "prom')
    lines(path / "judge/m/verdicts.jsonl", verdict(1))
    (judged,) = judged_of(read_run(path))
    assert len(judged.examples) == 1


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("judge/n/summary.json", "{", "judge/n/summary.json is damaged"),
        ("judge/n/summary.json", "{}", "win_rate: field required; restore it from a backup"),
        ("judge/n/verdicts.jsonl", "[]\n", "line 1: the content: should be an object"),
        ("judge/n/verdicts.jsonl", '{"row": 1}\n', "line 1: prompt: field required"),
        ("judge/n/verdicts.jsonl", "{\n", "verdicts.jsonl is damaged: line 1: "),
        ("align/summary.json", '{"prompts": 3}', "summary.json is damaged: prompts: should be an object"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    path = judged_run(tmp_path / "run")
    (path / file).parent.mkdir(exist_ok=True)
    (path / file).write_text(text)
    with pytest.raises(RunError, match=re.escape(message)):
        render(read_run(path))


def label(index: int, chosen: str) -> dict[str, Any]:
    return {
        **{"prompt": f"prompt {index}", "chosen": chosen, "rejected": "worse", "votes": [2, 1]},
        **{"margin": 0.5, "index": index},
    }


def test_a_page_says_what_an_alignment_counted(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    lines(path / "align/labels.jsonl", label(0, "better"), label(0, "second label"), label(4, "<i>good"))
    (path / "align/summary.json").write_text(json.dumps(ALIGNED))
    page = re.sub(r"</?t[hd][^>]*>", "|", render(read_run(path)))
    for text in (
        "9 of 12; left out: 2 held by clients, 1 duplicates",
        "6, 4 unanimously",
        "2 with equal completions, 1 ties",
        "5 pairs, 1 held out",
        "|2 (kept)||0.5000||1.000|",
        "Prompt 1 · 2 to 1 votes",
        "&lt;i&gt;good",
    ):
        assert text in page
    assert "second label" not in page
    aligned = alignment_of(path)
    assert aligned is not None
    assert [each.prompt for each in aligned.examples] == ["prompt 0", "prompt 4"]
