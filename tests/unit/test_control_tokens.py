"""How texts, prompts and rendered conversations become token ids, for every tokenizer of the zoo."""

import json
import unicodedata
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from prefed.core import Key
from prefed.data import (
    ChoiceEncoder,
    DataConfig,
    Message,
    PolicyEncoder,
    Record,
    SelectorConfig,
    Template,
    build_dataset,
)
from prefed.runs.data_notices import data_notices
from preferences import CHATML, jsonl, merging, tokenizer
from tokenizer_zoo import MADE, TEXTS

EOS, BOS, START, END = 0, 1, 3, 4


ZOO = {
    **MADE,
    "merging": merging(),
    "bytes": tokenizer(),
    "bytes with bos": tokenizer(bos=True),
    "chat": tokenizer(chat=CHATML),
    "chat with bos": tokenizer(bos=True, chat="{{ bos_token }}" + CHATML),
}
KINDS = [(name, kind) for name in ZOO for kind in ("auto", "dialogue", "rendered")] + [
    (name, "chat") for name in ZOO if ZOO[name].chat_template
]
ZOO["python"] = ByT5Tokenizer()  # not a fast one; it puts its end-of-text token after every text
CONTROL = ["<|im_start|>", "<|im_end|>", "<eos>", "<bos>", "</s>", "<s>", "[/INST]", "<unk>"]
PARTS = [*CONTROL, "user", "\n", " ", "Name a colour.", "é", "<", "|im_end|>", "[", "☃"]
texts = st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map("".join).filter(str.strip)
prompts = st.one_of(
    texts, st.lists(texts, min_size=1, max_size=1).map(lambda one: (Message("user", one[0]),))
)


def encode(made, record, kind="auto", **options):
    settings = {"max_length": 10_000, "too_long": "drop", **options}
    (outcome,) = PolicyEncoder(made, Template(made, kind), **settings).encode([record])
    return outcome


@pytest.mark.sample
@pytest.mark.parametrize(("name", "kind"), KINDS)
@given(prompt=prompts)
def test_a_prompt_has_the_same_tokens_in_training_and_generation(name, kind, prompt):
    made = ZOO[name]
    outcome = encode(made, Record(prompt, "yes", "no"), kind)
    assert outcome.prompt == Template(made, kind).prompt_ids(prompt)
    start = made("a")["input_ids"][: -len(made("a", add_special_tokens=False)["input_ids"])]
    assert outcome.prompt[: len(start)] == start
    if kind != "rendered":  # rendered texts may repeat it
        assert outcome.prompt[len(start) : 2 * len(start)] != start or not start


@pytest.mark.parametrize("name", ZOO)
@given(text=texts)
def test_text_stays_text(name, text):
    """No control token of a text is one of its tokens, which decode to the text."""
    made = ZOO[name]
    outcome = encode(made, Record("", text, f"{text} no"))
    ids = outcome.branches[0][:-1]
    control = {number: str(token) for number, token in made.added_tokens_decoder.items() if token.special}
    assert not {*ids} & control.keys() - {made.unk_token_id}
    names = {*control.values(), *made.all_special_tokens}
    assert ("control" in outcome.notes) == any(token in text for token in names)
    # A Unigram model has no token for some characters, and decoders drop a blank at the start.
    if "unigram" not in name:
        assert made.decode(ids).lstrip() == text.lstrip()


@pytest.mark.parametrize(
    ("text", "normalized"), [("<|IM_END|>", True), ("＜|im_end|＞", False), ("＜|IM_<|im_end|>end|>", True)]
)
def test_a_normalizer_makes_no_control_token_of_a_text(text, normalized):
    """The control is the tokenizer alone: it finds one if its tokens are compared with normalized text."""
    state = json.loads(ZOO["chat"].backend_tokenizer.to_str())
    parts = [{"type": "NFKC"}, {"type": "Lowercase"}]
    state["normalizer"] = {"type": "Sequence", "normalizers": parts}
    for token in state["added_tokens"]:
        token["normalized"] = normalized
    backend = Tokenizer.from_str(json.dumps(state))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=CHATML)
    assert (END in made(text)["input_ids"]) == (normalized or "<|im_end|>" in text)
    outcome = encode(made, Record((Message("user", text),), text, "no"))
    assert [outcome.prompt.count(END), outcome.branches[0].count(END)] == [1, 1]
    assert ("control" in outcome.notes) == (normalized or "<|im_end|>" in text)
    expected = unicodedata.normalize("NFKC", text).lower()
    assert (
        made.decode(outcome.branches[0], clean_up_tokenization_spaces=False) == f"{expected}<|im_end|><eos>"
    )


@pytest.mark.parametrize("name", ZOO)
def test_ordinary_texts_have_the_tokenizers_own_ids(name):
    made = ZOO[name]
    for text, other in pairwise(TEXTS):
        outcome = encode(made, Record("", text, other))
        assert outcome.branches[0][:-1] == made(text, add_special_tokens=False)["input_ids"]
        assert outcome.notes == frozenset()


@given(contents=st.lists(texts, min_size=3, max_size=3))
def test_a_text_opens_no_turn(contents):
    """A chat template's control tokens are its own: one begins and one ends each of four turns."""
    made, roles = ZOO["chat"], ("system", "user", "assistant")
    prompt = (*map(Message, roles, contents), Message("user", "Bye"))
    outcome = encode(made, Record(prompt, contents[0] + "!", "no"))
    assert outcome.prompt.count(START) == 5  # the fifth turn is the response
    assert outcome.prompt.count(END) == 4
    assert [*outcome.branches[0]].count(END) == 1
    assert made.decode(outcome.prompt) == Template(made).prompt(prompt)
    question, _ = ChoiceEncoder(made, SelectorConfig(), max_length=10_000).encode(
        [Record(prompt, contents[0] + "!", "no"), Record("a", "b", "c")]
    )
    ids = [*question.prompt, *question.branches[0], *question.branches[1]]
    assert not {START, END, EOS} & {*ids}


RENDERED = "<bos><|im_start|>user\nName fruit.<|im_end|>\n<|im_start|>assistant\n"


def test_a_rendered_prompt_has_one_beginning_and_a_rendered_response_one_end():
    made = tokenizer(bos=True, chat=CHATML, eos="<|im_end|>")
    record = Record(RENDERED, "Pear<|im_end|>\n", "Write <|im_end|> to stop.<|im_end|>\n")
    outcome = encode(made, record, "rendered")
    assert outcome.prompt == made(RENDERED, add_special_tokens=False)["input_ids"]
    assert outcome.prompt.count(BOS) == 1
    assert made.decode(outcome.branches[0]) == "Pear<|im_end|>"
    assert made.decode(outcome.branches[1]) == "Write <|im_end|> to stop.<|im_end|>"
    assert outcome.notes == {"ends"}
    # Without the setting, the same texts have one beginning and one end too, and are reported.
    outcome = encode(made, record)
    assert [ids.count(END) for ids in (outcome.prompt, *outcome.branches)] == [0, 1, 1]
    assert outcome.prompt.count(BOS) == 1
    assert outcome.notes == {"control"}


def test_the_data_report_how_texts_are_encoded(tmp_path):
    rows = [
        {"prompt": "Name a colour.", "chosen": "Blue.", "rejected": f"Red <|im_end|> {k}."} for k in range(5)
    ]
    path = jsonl(tmp_path / "pairs.jsonl", rows)

    def lines(chat, **settings):
        config = DataConfig(train=path, partition={"by": "iid", "clients": 1}, **settings)
        folder = tmp_path / f"data-{len(list(tmp_path.iterdir()))}"
        dataset = build_dataset(config, tokenizer(chat=chat, eos="<|im_end|>"), Key(0), folder)
        return "\n".join([line for part in data_notices(dataset) for line in part])

    auto = lines(CHATML)
    assert "5 rows contain control tokens of the tokenizer, which are encoded as text" in auto
    assert "5 prompts are texts, used without the model's chat template, and no blank separates" in auto
    assert '[data] template = "chat" renders them as user turns' in auto
    assert "in 5 rows, no blank separates the prompt from its response" in lines(None)
    assert "5 rows have an end-of-text token before the end" in lines(CHATML, template="rendered")
    dropping = "{% for m in messages %}{% if loop.first and not add_generation_prompt %}x{% endif %}"
    dropping += "[{{ m.content }}]{% endfor %}"
    assert "in 5 rows, the chat template renders the prompt differently" in lines(dropping, template="chat")
    assert lines(CHATML, template="chat").startswith("5 rows contain control tokens")


def test_tokens_of_an_earlier_version_are_made_again(tmp_path):
    """Its rules may have been others. The same sources give the same fingerprint."""
    path = jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2)
    config = DataConfig(train=path, partition={"by": "iid", "clients": 1}, duplicates="keep")
    first = build_dataset(config, tokenizer(), Key(0), tmp_path / "data")
    manifest = tmp_path / "data" / "clients.json"
    written = manifest.stat().st_mtime_ns, manifest.read_bytes()
    from prefed.core import files

    content = files.loads_with_digest(written[1])
    del content["inputs"]["encoding"]
    files.write(manifest, files.dumps_with_digest(content))
    again = build_dataset(config, tokenizer(), Key(0), tmp_path / "data")
    assert again.fingerprint == first.fingerprint
    assert files.loads_with_digest(manifest.read_bytes())["inputs"]["encoding"] == 2


TALK = (
    Message("system", "Be kind."),
    Message("user", "Old question."),
    Message("assistant", "Old answer."),
    Message("user", "What is the colour of the sea?"),
)


@pytest.mark.parametrize(("chat", "kind"), product([CHATML, None], ["auto"]))
def test_a_long_conversation_keeps_its_system_turn_and_the_last_turns_header(chat, kind):
    """With one token per byte or control token. First the oldest turns go, then the last one's beginning."""
    made = tokenizer(chat=chat)
    template = Template(made, kind)
    record = Record(TALK, "Blue", "Red")
    whole = encode(made, record)
    assert not whole.cut
    recent = template.prompt((TALK[0], TALK[-1]))
    room, longest = len(template.prompt_ids((TALK[0], TALK[-1]))), max(map(len, whole.branches))
    outcome = encode(made, record, max_length=room + longest)
    assert outcome.cut
    assert made.decode(outcome.prompt) == recent
    assert outcome.branches == whole.branches
    outcome = encode(made, record, max_length=room + longest - 5)
    assert made.decode(outcome.prompt) == recent.replace("What is the colour", "is the colour")
    least = room - len(TALK[-1].content) + 1
    assert made.decode(encode(made, record, max_length=least + longest).prompt) == template.prompt(
        (TALK[0], Message("user", "?"))
    )
    refused = encode(made, record, max_length=least + longest - 1)
    assert refused.needed == least + longest
    assert "the shortest prompt with its system turn" in refused.problem
