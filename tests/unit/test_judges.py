"""Judges on this machine, and what their verdicts become."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2ForSequenceClassification

from prefed.align.judge import TEMPLATES, JudgeError, PairTemplate, Question, Verdict, outcome
from prefed.align.judge.local import LocalJudge, RewardJudge, UtilityJudge, read_taste
from prefed.align.judge.questions import (
    criterion_template,
    get_template,
    numbered_prompts,
    parse_autoj,
    parse_marks,
    parse_plain,
    references,
)
from prefed.config.align import JudgeOptions
from prefed.core import Key
from prefed.data import DataError, Record, synthetic
from prefed.data.record import Message
from prefed.models import ModelError
from prefed.models.tiny import make_tiny
from small_models import save_reward_model

CPU = JudgeOptions(device="cpu")
WORDS = ["good bad fine poor red blue", "the red one is good", "the blue one is poor and bad"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny causal model, and a reward model of two blocks with its tokenizer."""
    folder = tmp_path_factory.mktemp("judges")
    make_tiny(folder / "lm", WORDS, Key(0), layers=1, width=16, heads=2, vocabulary=280, context=256, steps=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "lm")
    tokens = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": 0}
    save_reward_model(folder / "reward", tokenizer, initializer_range=0.5, **tokens)
    return folder


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        (1.0, 0.0, 1.0),
        (0.0, 1.0, 0.0),
        (0.5, 0.5, 0.5),
        (1.0, 1.0, 0.5),
        (0.0, 0.0, 0.5),
        (1.0, 0.5, 0.5),
        (0.5, 1.0, 0.5),
        (None, 0.0, None),
        (1.0, None, None),
    ],
)
def test_disagreement_is_a_tie_and_an_unusable_answer_no_outcome(forward, backward, expected):
    assert outcome(Verdict(forward, ""), Verdict(backward, "")) == expected


def test_verdicts_are_read(subtests):
    for parse, answer, preference in (
        (parse_plain, "A", 1.0),
        (parse_plain, " b.\n", 0.0),
        (parse_plain, "Tie", 0.5),
        (parse_plain, "<think>A is odd.</think>\n\nFinal answer: **B**", 0.0),
        (parse_plain, "My verdict is response A.", 1.0),
        (parse_plain, "A is the better one, B is not", None),
        (parse_plain, "Apples", None),
        (parse_plain, "The final answer is: *Tie*", 0.5),
        # Two thousand million steps if each way to share the marks out were tried.
        (parse_plain, "!" * 60_000 + "x", None),
        (parse_plain, "", None),
        (parse_marks, "Both are good. My verdict: [[C]]", 0.5),
        (parse_marks, "[[A]] or [[B]]? [[A]]", 1.0),
        (parse_marks, "[A]", None),
        (parse_autoj, "1. …\n2. …\nSo, the final decision is Response 1.", 1.0),
        (parse_autoj, "So, the final decision is **Tie**.", 0.5),
        (parse_autoj, "the final decision is Response 1. No: the final decision is Response 2", 0.0),
        (parse_autoj, 'Begin with "So, the final decision is Response 1 / Response 2 / Tie".', None),
        (parse_autoj, "So, the final decision is Response 3", None),
        (parse_autoj, "Response 1 is better", None),
    ):
        with subtests.test(parse=parse, answer=answer):
            assert parse(answer) == preference


@given(st.text(max_size=60))
def test_no_answer_breaks_a_parser(text):
    assert all(template.verdict(text).preference in (None, 0.0, 0.5, 1.0) for template in TEMPLATES.values())


def test_a_criterion_is_a_template_of_language_models():
    """Both ask in the form of plain, and each by its own criterion alone."""
    helpful, harmless = (get_template(name).text for name in ("helpful", "harmless"))
    assert criterion_template("helpful", "plain", "local:folder") == "helpful"
    assert "more helpful" in helpful
    assert "more helpful" not in harmless
    assert helpful[helpful.index("<prompt>") :] == harmless[harmless.index("<prompt>") :]
    with pytest.raises(ValueError, match="leave out --template auto-j"):
        criterion_template("helpful", "auto-j", "local:folder")
    with pytest.raises(ValueError, match=r"needs a language model as the judge .*, not 'utility'"):
        criterion_template("harmless", "plain", "utility")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_prompt_and_responses_in_order(name):
    """A response that looks like a field stays what it is."""
    prompt = (Message("user", "Why?"), Message("assistant", "So."), Message("user", "Really?"))
    text = get_template(name).render(Question(prompt, "one {second}", "zwei"))
    assert text.index("Really?") < text.index("one {second}") < text.index("zwei")
    with pytest.raises(ValueError, match="the templates are plain, mt-bench, auto-j"):
        get_template(name + "x")


def test_a_reward_judge_prefers_the_higher_reward(place):
    """Oracle: transformers alone, a sequence at a time; the tokens of both texts are joined."""
    tokenizer = AutoTokenizer.from_pretrained(place / "reward")
    model = GPT2ForSequenceClassification.from_pretrained(place / "reward").eval()
    texts = [" good", " bad", " the red one", "", " poor and bad", " good"]
    questions = [Question("the blue one", a, b) for a in texts for b in texts]

    def reward(text):
        ids = [*tokenizer("the blue one")["input_ids"], *tokenizer(text)["input_ids"]]
        with torch.inference_mode():
            return float(model(torch.tensor([ids])).logits[0, 0])

    rewards = {text: reward(text) for text in texts}
    judge = RewardJudge(str(place / "reward"), CPU)
    verdicts = list(judge.compare(questions))
    for question, verdict in zip(questions, verdicts, strict=True):
        gap = rewards[question.first] - rewards[question.second]
        assert verdict.preference == (0.5 if question.first == question.second else float(gap > 0))
    assert len({round(value, 4) for value in rewards.values()}) == 5
    back = list(judge.compare(question.swapped() for question in questions))
    assert [outcome(*pair) for pair in zip(verdicts, back, strict=True)] == [v.preference for v in verdicts]


def test_a_causal_model_is_no_reward_model(place):
    with pytest.raises(ModelError, match=r"--judge reward = .*: this is not a sequence classification model"):
        RewardJudge(str(place / "lm"), CPU)
    with pytest.raises(ModelError, match=r"--judge local = .*no such folder"):
        LocalJudge(str(place / "none"), CPU)


def test_a_local_judge_answers_as_generate_does(place, monkeypatch):
    """Oracle: ``generate`` of plain transformers on the template's bare text."""
    template = PairTemplate("{prompt} {first} {second}", parse_plain, "{text}\n\nAnswer:")
    monkeypatch.setitem(TEMPLATES, "short", template)
    judge = LocalJudge(str(place / "lm"), JudgeOptions(template="short", judge_tokens=6, device="cpu"))
    (verdict,) = judge.compare([Question("good", "red", "blue")])
    model = AutoModelForCausalLM.from_pretrained(place / "lm").eval()
    tokenizer = AutoTokenizer.from_pretrained(place / "lm")
    ids = tokenizer("good red blue\n\nAnswer:", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        output = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    expected = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()
    assert verdict == Verdict(None, f"no verdict in the answer: {expected}")


def test_a_question_beyond_the_window_has_no_answer(place):
    judge = LocalJudge(str(place / "lm"), JudgeOptions(template="auto-j", device="cpu"))
    (verdict,) = judge.compare([Question("good", "red", "blue")])
    assert verdict.preference is None
    assert "the model's context is 256; shorten it" in verdict.text


def test_a_chat_template_beyond_its_limits_is_no_verdict(place, tmp_path):
    shutil.copytree(place / "lm", tmp_path / "lm")
    (tmp_path / "lm" / "chat_template.jinja").write_text("{{ 'x' * 10000000 }}")
    judge = LocalJudge(str(tmp_path / "lm"), CPU)
    with pytest.raises(DataError, match="makes 10,000,000 characters of one conversation"):
        next(judge.compare([Question("good", "red", "blue")]))


@pytest.mark.parametrize("flipped", [(), ("ada",)])
def test_tastes_are_read_off_utilities(flipped):
    """The weights that :func:`synthetic.tastes` drew come out again; a client whose preferences are turned
    round has the opposite ones."""
    records = synthetic.generate(Key(5), clients=4, train=30, test=0)
    records = [record.swapped() if record.client in flipped else record for record in records]
    tastes = synthetic.tastes(Key(5), 4)
    for client, taste in tastes.items():
        sign = -1 if client in flipped else 1
        read = read_taste(client, records, flipped).weights
        assert read == {name: sign * weight for name, weight in taste.weights.items()}
    mean = (
        read_taste("mean", records).weights if not flipped else read_taste("mean", records, flipped).weights
    )
    total = sum((-1 if client in flipped else 1) * t.weights["warmth"] for client, t in tastes.items())
    assert mean["warmth"] == total / 4
    with pytest.raises(JudgeError, match="no such client in the data of the run; did you mean 'ada'"):
        read_taste("adda", records)


def test_tastes_need_utilities():
    with pytest.raises(JudgeError, match="utility_chosen"):
        read_taste("mean", [Record("p", "a", "b", client="ada")])
    extra = {"utility_chosen": 1.0, "utility_rejected": 0.0}
    with pytest.raises(JudgeError, match="too few"):
        read_taste("mean", [Record("p", "a", "b", client="ada", extra=extra)])


def test_the_utility_judge_is_the_oracle():
    """On pairs of the set it prefers the response of larger utility, whatever the label."""
    records = synthetic.generate(Key(6), clients=2, train=20, test=0)
    for client, taste in synthetic.tastes(Key(6), 2).items():
        own = [record for record in records if record.client == client]
        verdicts = UtilityJudge(taste).compare(Question(r.prompt, r.chosen, r.rejected) for r in own)
        for record, verdict in zip(own, verdicts, strict=True):
            gap = float(record.extra["utility_chosen"]) - float(record.extra["utility_rejected"])
            assert verdict.preference == float(gap > 0)


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def test_prompts_are_numbered(tmp_path):
    """A row that cannot be used is refused with its place: left out, it would shift all later answers."""
    turns = '{"prompt": [{"role": "user", "content": "two"}]}'
    rows = numbered_prompts(write(tmp_path / "p.jsonl", '{"prompt": "one", "n": 1}', turns))
    assert [(row.row, row.prompt) for row in rows] == [(1, "one"), (2, (Message("user", "two"),))]
    assert rows[0].extra == {"n": 1}
    path = write(tmp_path / "q.jsonl", '{"instruction": "one", "output": "x"}')
    assert numbered_prompts(path, "instruction")[0].prompt == "one"
    path = write(tmp_path / "bad.jsonl", '{"prompt": "one"}', '{"prompt": " "}', '{"prompt": "two"}')
    with pytest.raises(ValueError, match=r"bad.jsonl, row 2: the prompt is blank"):
        numbered_prompts(path)


def test_references_answer_the_same_prompt(tmp_path):
    prompts = numbered_prompts(write(tmp_path / "p.jsonl", '{"prompt": "one"}', '{"prompt": "two"}'))
    good = '{"prompt": "one", "y": "1"}', '{"prompt": "two", "y": "2"}'
    assert references(write(tmp_path / "a.jsonl", *good), "y", prompts) == ["1", "2"]
    with pytest.raises(ValueError, match="row 1: the prompt differs from prompt 1"):
        references(write(tmp_path / "c.jsonl", *good[::-1]), "y", prompts)
    for lines in (good[:1], (*good, good[0])):
        with pytest.raises(ValueError, match=rf"{len(lines)} rows for 2 prompts"):
            references(write(tmp_path / "d.jsonl", *lines), "y", prompts)
    with pytest.raises(ValueError, match="row 2: no answer in column 'y'"):
        references(write(tmp_path / "e.jsonl", good[0], '{"prompt": "two"}'), "y", prompts)
