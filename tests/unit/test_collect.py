"""Sessions of ``prefed collect`` without their page: what is kept, taken back, and found again."""

import json
import shutil
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collecting import RECORDS, session
from law_examples import examples
from prefed.core import Key
from prefed.data import DataConfig, Message, Record
from prefed.data.errors import ErrorCollector
from prefed.data.sources import ReadCounts, read_records
from prefed.data.tokens import prompt_hash
from prefed.models import ModelConfig, load_backbone
from prefed.models.tiny import make_tiny
from prefed.runs.finished_run import RunError
from prefed.train.generation import Sampling, complete_batch
from prefed.ui.collect import page
from prefed.ui.collect.pairs import Choices, CollectError, DrawnPairs, recorded_pairs
from prefed.ui.collect.response_generator import Drawing, ModelResponder
from prefed.ui.collect.session import Progress
from waiting import WATCHDOG


def lines(folder):
    return [json.loads(line) for line in (folder / "pairs.jsonl").read_text("utf-8").splitlines()]


def train_source(path):
    """The records that ``data.train`` reads."""
    config = DataConfig.model_validate(
        {"train": str(path), "partition": {"by": "column", "column": "client"}}
    )
    errors = ErrorCollector()
    records = [r for r, _ in read_records(config.train, config, "train", None, errors, ReadCounts())]
    errors.raise_if_any()
    return records


@examples(30)
@given(
    st.lists(
        st.tuples(st.sampled_from(("left", "right", "neither", "undo")), st.booleans(), st.sampled_from("ab"))
    )
)
def test_after_any_answers_and_restarts_the_files_hold_what_was_said(tmp_path_factory, steps):
    """The reference is a list of answers for each of two people who take turns at one file. ``True`` starts
    the command again before the step. Nobody can take back a pair that is not the file's last line."""
    folder = tmp_path_factory.mktemp("session")
    said: dict[str, list] = {"a": [], "b": []}
    written = []
    context = session(folder, client=None)
    opened = context.__enter__()
    for what, again, client in steps:
        if again:
            context.__exit__(None, None, None)
            context = session(folder, client=None)
            opened = context.__enter__()
        opened.name(client)
        own = said[client]
        if what != "undo":
            shown = opened.current()
            if shown is None:
                assert len(own) == len(RECORDS)
                continue
            assert opened.choose(shown.question.number, what)
            own.append((shown.question.number, what))
            if what != "neither":
                written.append((client, shown.question.prompt, shown.texts[what == "right"]))
        elif own and own[-1][1] != "neither" and written[-1][0] != client:
            with pytest.raises(CollectError, match=r"nothing to undo: the last line of .* is not a choice"):
                opened.take_back()
        else:
            assert opened.take_back() == bool(own)
            if own and own.pop()[1] != "neither":
                written.pop()
        assert opened.judged() == {number for number, _ in own}
        assert [(row["client"], row["prompt"], row["chosen"]) for row in lines(folder)] == written
    context.__exit__(None, None, None)


def test_a_file_of_choices_is_what_train_takes(tmp_path):
    records = [
        Record((Message("system", "Be brief."), Message("user", "Name a colour.")), "Blue.", "A dog."),
        Record("Zoë's Fall:", " up\n", ' "down"', margin=0.5, category="c", split="test", extra={"age": 7}),
    ]
    with session(tmp_path, records) as opened:
        for strength in (None, 3):
            opened.choose(opened.current().question.number, "left", strength)
    rows = train_source(tmp_path / "pairs.jsonl")
    assert [row.client for row in rows] == ["ann", "ann"]
    assert [(row.margin, row.split) for row in rows] == [(None, None), (3, "test")]
    assert rows[1].extra["age"] == 7
    for row, record in zip(rows, records, strict=True):
        assert row.prompt == record.prompt
        same = (row.chosen, row.rejected) == (record.chosen, record.rejected)
        assert same or (row.rejected, row.chosen) == (record.chosen, record.rejected)
        assert row.extra["agrees"] == same


def test_pairs_that_were_there_are_nobodys_to_take_back(tmp_path):
    """``--out`` may be a file of pairs that people recorded elsewhere, under the same name."""
    there = (
        json.dumps({"prompt": "Case 0:", "chosen": " up 0", "rejected": " down 0", "client": "ann"}) + "\n"
    )
    (tmp_path / "pairs.jsonl").write_text(there)
    with session(tmp_path) as opened:
        assert not opened.take_back()
        for answer in ("left", "neither"):
            opened.choose(opened.current().question.number, answer)
        assert [opened.take_back() for _ in range(3)] == [True, True, False]
    assert (tmp_path / "pairs.jsonl").read_text() == there


def test_a_line_that_a_kill_left_unfinished_costs_no_other(tmp_path):
    """The file is cut after each of the last line's bytes. Whatever is left of the line, what stood before it
    is there, and the last question is asked again unless all but the line's end is there."""
    whole = tmp_path / "whole"
    with session(whole) as opened:
        for _ in range(3):
            last = opened.current().question.number
            opened.choose(last, "right")
    data = (whole / "pairs.jsonl").read_bytes()
    start = data.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(start, len(data) + 1):
        shutil.rmtree(tmp_path / "cut", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "cut")
        (tmp_path / "cut" / "pairs.jsonl").write_bytes(data[:end])
        with session(tmp_path / "cut") as opened:
            kept = end >= len(data) - 1
            assert len(opened.judged()) == 2 + kept
            if not kept:
                assert opened.current().question.number == last
                opened.choose(last, "right")
        assert (tmp_path / "cut" / "pairs.jsonl").read_bytes() == data


def test_a_choice_that_finds_no_room_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    from prefed.core import files

    with session(tmp_path) as opened:
        opened.choose(opened.current().question.number, "left")
        before, write = (tmp_path / "pairs.jsonl").read_bytes(), files._write_all

        def full(handle, data):
            write(handle, data[:9])
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(files, "_write_all", full)
            with pytest.raises(files.WriteError, match="No space left on device; free up space on the disk"):
                opened.choose(opened.current().question.number, "left")
        assert (tmp_path / "pairs.jsonl").read_bytes() == before
        assert len(opened.judged()) == 1
        opened.choose(opened.current().question.number, "left")
    assert len(lines(tmp_path)) == 2


def test_the_page_says_nothing_of_the_recorded_choice(tmp_path):
    """A pair and the pair with the opposite choice give one page, byte for byte."""
    pages = []
    for number, record in enumerate((RECORDS[0], RECORDS[0].swapped())):
        with session(tmp_path / str(number), [record]) as opened:
            text = page.render(opened, "pair", typed=False)
            pages.append(text.replace(str(tmp_path / str(number)), ""))
    assert pages[0] == pages[1]


def test_sides_are_drawn_once_for_each_question_and_person(tmp_path):
    """Of 400 fair draws 200 are expected on either side, with a standard deviation of 10."""
    records = [Record(f"Case {k}:", " up", " down") for k in range(400)]
    sides = {}
    for folder, client in (("one", "ann"), ("two", "ann"), ("two", "bob")):
        with session(tmp_path / folder, records, client) as opened:
            order = []
            for _ in range(400) if folder == "one" else range(20):
                shown = opened.current()
                order.append(shown.order)
                opened.choose(shown.question.number, "left")
        sides[folder, client] = order
    assert 160 < sides["one", "ann"].count((0, 1)) < 240
    assert sides["one", "ann"][:20] == sides["two", "ann"] != sides["two", "bob"]


def test_agreement_is_over_choices_and_survives_a_restart(tmp_path):
    """Six questions: four answered as recorded, one otherwise, one with neither. Then p_o = 4/5. κ follows
    from the sides. The recorded choice is always the text that begins with "up"."""
    plan = ["agree", "agree", "differ", "neither", "agree", "agree"]
    with session(tmp_path) as opened:
        for what in plan:
            shown = opened.current()
            right = shown.order[1] == shown.question.recorded
            side = "neither" if what == "neither" else ("left", "right")[right == (what == "agree")]
            opened.choose(shown.question.number, side)
    with session(tmp_path) as opened:
        result = opened.agreement()
        assert opened.progress().done == 6
    assert (result.agreed, result.judged) == (4, 5)
    own = [row["side"] == "left" for row in lines(tmp_path)]
    recorded = [
        left if row["chosen"].startswith(" up") else not left
        for left, row in zip(own, lines(tmp_path), strict=True)
    ]
    chance = (sum(own) * sum(recorded) + (5 - sum(own)) * (5 - sum(recorded))) / 25
    assert result.kappa == pytest.approx((0.8 - chance) / (1 - chance))


def test_agreement_is_over_the_questions_that_are_asked(tmp_path):
    """Two answers against the recorded choice, then two others as recorded, into one file: two of two."""
    with session(tmp_path, RECORDS[:2]) as opened:
        for _ in range(2):
            shown = opened.current()
            right = shown.order[1] == shown.question.recorded
            opened.choose(shown.question.number, ("right", "left")[right])
        assert (opened.agreement().agreed, opened.agreement().judged) == (0, 2)
    with session(tmp_path, RECORDS[2:4]) as opened:
        for _ in range(2):
            shown = opened.current()
            right = shown.order[1] == shown.question.recorded
            opened.choose(shown.question.number, ("left", "right")[right])
        assert (opened.agreement().agreed, opened.agreement().judged) == (2, 2)


def test_what_cannot_be_kept_is_refused_with_a_reason(tmp_path):
    with session(tmp_path) as opened:
        with pytest.raises(CollectError, match="U\\+0009"):
            opened.name("ann\tlee")
        with pytest.raises(CollectError, match="0 characters"):
            opened.name("  ")
        with pytest.raises(CollectError, match="this question does not exist; reload the page"):
            opened.choose(1, "left")
        number = opened.current().question.number
        assert opened.choose(number, "left")
        assert not opened.choose(number, "right")
        with (tmp_path / "pairs.jsonl").open("a") as other:
            other.write("{}\n")
        with pytest.raises(CollectError, match="changed by another program"):
            opened.choose(opened.current().question.number, "left")
        with pytest.raises(RunError, match="in use by another process"), session(tmp_path):
            pass
    (tmp_path / "pairs.jsonl").write_text('{"a": 1}\n[2]\n')
    with pytest.raises(CollectError, match="line 2: not a JSON object; correct it"):
        Choices(tmp_path / "pairs.jsonl")
    with pytest.raises(CollectError, match=r"the file name must end in \.jsonl"):
        Choices(tmp_path / "pairs.csv")


def test_recorded_pairs_are_those_that_train_reads(tmp_path):
    rows = [{"prompt": f"Q{k}", "chosen": "yes", "rejected": "no"} for k in (1, 2, 1, 3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = recorded_pairs(str(tmp_path / "a.jsonl"), None)
    assert [pairs.get(number).prompt for number in pairs.numbers()] == ["Q1", "Q2", "Q3"]
    assert len(recorded_pairs(str(tmp_path / "a.jsonl"), 3).numbers()) == 2


class Echo:
    """Responds with the prompt and a number; to "mute" with nothing."""

    def __init__(self, identity="echo"):
        self.identity, self.drawn = identity, []

    def as_prompt(self, text):
        return text

    def draw(self, prompt):
        self.drawn.append(prompt)
        return "it is mute" if prompt == "mute" else (f"{prompt} 1", f"{prompt} 2")


def until(opened, done):
    with opened.changed:
        assert opened.changed.wait_for(done, timeout=WATCHDOG)


@contextmanager
def drawing(folder, prompts, echo, ahead, report=lambda text: None):
    made = []

    def questions(journal):
        made.append(DrawnPairs(prompts, journal, echo.identity))
        return made[0]

    with (
        session(folder, questions=questions) as opened,
        Drawing(opened, made[0], echo, ahead=ahead, report=report) as drawn,
    ):
        yield opened, drawn


def prompt_of(opened):
    return opened.current().question.prompt


def test_responses_are_drawn_ahead_and_typed_prompts_come_next(tmp_path):
    got, echo = [], Echo()
    with drawing(tmp_path, ["one", "mute", "two", "one", "three"], echo, 2, got.append) as (opened, drawn):
        until(opened, lambda: len(echo.drawn) == 3)
        until(opened, lambda: opened.progress().of == 3)
        assert (echo.drawn, got) == (["one", "mute", "two"], ['left out: "mute": it is mute'])
        assert (prompt_of(opened), opened.current().question.responses) == ("one", ("one 1", "one 2"))
        drawn.add("typed")
        until(opened, lambda: prompt_of(opened) == "typed")
        opened.choose(opened.current().question.number, "left")
        with pytest.raises(CollectError, match="you have already answered this prompt; type another"):
            drawn.add("typed")
        with pytest.raises(CollectError, match="blank"):
            drawn.add(" \n")
        opened.choose(opened.current().question.number, "neither")
        until(opened, lambda: echo.drawn[3:] == ["typed", "three"])


def test_what_was_drawn_or_typed_is_there_after_a_restart(tmp_path):
    """The second start has the first one's responses and its typed prompt; the third has another model, and
    asks for all that is not answered once more."""
    echo = Echo()
    with drawing(tmp_path, ["one", "two"], echo, 9) as (opened, drawn):
        until(opened, lambda: len(echo.drawn) == 2)
        drawn.add("typed")
        until(opened, lambda: prompt_of(opened) == "typed")
        opened.choose(opened.current().question.number, "neither")
    again = Echo()
    with drawing(tmp_path, ["one", "two", "three"], again, 9) as (opened, _):
        assert prompt_of(opened) == "one"
        assert opened.progress().neither == 1
        until(opened, lambda: again.drawn == ["three"])
        opened.choose(opened.current().question.number, "left")
    other = Echo("another model")
    with drawing(tmp_path, ["one", "two"], other, 9) as (opened, _):
        until(opened, lambda: other.drawn == ["two"])
        assert opened.progress() == Progress(chosen=1, neither=1, of=3)
        assert opened.take_back()
        assert opened.take_back()
        until(opened, lambda: sorted(other.drawn) == ["one", "two", "typed"])


def test_a_model_that_fails_ends_the_drawing_with_its_error(tmp_path):
    class Broken(Echo):
        def draw(self, prompt):
            raise RuntimeError("out of memory")

    stack = ExitStack()
    opened, _ = stack.enter_context(drawing(tmp_path, ["one"], Broken(), 1))
    until(opened, lambda: opened.failure == "out of memory")
    assert page.state_of(opened) == "end"
    assert "The model stopped: out of memory" in page.render(opened, "end", typed=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        stack.close()


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny(
        folder,
        ["one two three"] * 9,
        Key(0),
        layers=1,
        width=16,
        heads=1,
        vocabulary=270,
        context=32,
        steps=1,
    )
    return load_backbone(ModelConfig(name=str(folder)), Key(0))


def test_a_model_draws_two_different_responses_the_same_each_time(backbone):
    """The independent draws are those of ``complete_batch`` for one sequence alone, under the keys that the
    class names; the prompt's own key makes them, whatever was drawn before."""
    how = Sampling(max_tokens=5, temperature=1.0)
    responder = ModelResponder(backbone, how, Key(3), None)
    first, second = responder.draw("one")
    assert first.strip() != second.strip()
    responder.draw("two")
    assert responder.draw("one") == (first, second)
    key, (ids,) = Key(3).at("prompt", prompt_hash("one")), backbone.tokenizer(["one"])["input_ids"]
    texts = []
    for sample in range(8):
        ((tokens, _),) = complete_batch(backbone, backbone.reference, [ids], how, [key.at("sample", sample)])
        texts.append(backbone.tokenizer.decode(tokens, skip_special_tokens=True))
    usable = list(dict.fromkeys(text for text in texts if text.strip()))
    assert [first, second] == usable[:2]
    assert ModelResponder(backbone, how, Key(4), None).identity != responder.identity


def test_a_prompt_without_two_responses_is_left_out_with_the_reason(backbone):
    """At a temperature of nearly 0 every draw is the likeliest one. The model's window has 32 tokens."""
    responder = ModelResponder(backbone, Sampling(max_tokens=3, temperature=1e-4), Key(0), None)
    assert responder.draw("one") == "the model generated no two different responses in 8 samples"
    assert responder.draw("one " * 40).endswith(" tokens, but the model's context is 32")


def test_a_prompt_that_the_chat_template_refuses_is_left_out(backbone, monkeypatch):
    refusal = (
        "{{ raise_exception('no system turn') if messages[0].role == 'system' }}{{ messages[-1].content }}"
    )
    monkeypatch.setattr(backbone.tokenizer, "chat_template", refusal)
    responder = ModelResponder(backbone, Sampling(max_tokens=3, temperature=1.0), Key(0), None)
    assert responder.as_prompt("Go") == (Message("user", "Go"),)
    assert len(responder.draw(responder.as_prompt("Go"))) == 2
    assert "no system turn" in responder.draw((Message("system", "Be brief."), Message("user", "Go")))


def test_a_typed_prompt_takes_the_form_of_the_others(backbone):
    how, like = Sampling(), "\n\nHuman: Hi\n\nAssistant:"
    assert ModelResponder(backbone, how, Key(0), like).as_prompt("Go") == "\n\nHuman: Go\n\nAssistant:"
    assert ModelResponder(backbone, how, Key(0), like, raw=True).as_prompt("Go") == "Go"
    assert ModelResponder(backbone, how, Key(0), None).as_prompt("Go") == "Go"


def test_both_good_and_both_bad_are_kept_as_thumbs(tmp_path):
    """Two thumbs an answer, in the order of the page, which ``data.train`` reads. They survive a restart
    and are taken back in the order of the answers, whichever file has them."""
    with session(tmp_path, thumbs=True) as opened:
        for answer in ("left", "good", "neither", "bad"):
            shown = opened.current()
            assert opened.choose(shown.question.number, answer)
            if answer == "good":
                texts = shown.texts
        assert opened.progress() == Progress(chosen=1, neither=1, of=8, thumbs=2)
        assert not opened.choose(shown.question.number, "good")
    records = train_source(tmp_path / "thumbs.jsonl")
    assert [(record.response, record.label) for record in records[:2]] == [(text, True) for text in texts]
    assert [record.label for record in records[2:]] == [False, False]
    assert {(record.client, record.category) for record in records} == {("ann", "c")}
    with session(tmp_path, thumbs=True) as opened:
        assert "Both good" in page.render(opened, "pair", typed=False)
        left = []
        while opened.take_back():
            progress = opened.progress()
            left.append((progress.chosen, progress.thumbs, progress.neither))
        assert left == [(1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 0, 0)]
    assert (tmp_path / "thumbs.jsonl").read_bytes() == (tmp_path / "pairs.jsonl").read_bytes() == b""


def test_half_an_answer_of_a_killed_process_is_taken_back(tmp_path):
    with session(tmp_path, thumbs=True) as opened:
        for answer in ("bad", "good"):
            opened.choose(opened.current().question.number, answer)
    path = tmp_path / "thumbs.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with session(tmp_path, thumbs=True) as opened:
        assert opened.progress().thumbs == 2
        assert opened.take_back()
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])


def test_thumbs_need_a_file_and_pairs_to_judge(tmp_path):
    with session(tmp_path) as opened:
        assert "Both good" not in page.render(opened, "pair", typed=False)
        with pytest.raises(CollectError, match="--thumbs FILE"):
            opened.choose(opened.current().question.number, "bad")
    with (
        pytest.raises(CollectError, match="contains thumbs"),
        session(tmp_path, [Record.thumb("Q", "a", up=True)]),
    ):
        pass
