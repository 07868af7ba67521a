"""Scores of a reward model: how texts are joined and cut, how scores are stored, which models are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from prefed.data import Record, Template
from prefed.data.encoding import token_ids
from prefed.data.record import Message
from prefed.models import ModelError
from prefed.train import reward_model
from prefed.train.reward_model import RewardModel, Rewards
from small_models import save_reward_model
from tokenizer_zoo import MADE

WORDS = [
    "[PAD]",
    "[CLS]",
    "[SEP]",
    "[UNK]",
    *"abcdefghijklmnopqrstuvwxyz",
    "Human",
    "Assistant",
    ":",
    "<",
    ">",
]
CPU = torch.device("cpu")


def tokenizer(pair: bool = True, limit: int = 12, **options: Any) -> PreTrainedTokenizerFast:
    inner = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, "[UNK]"))
    inner.pre_tokenizer = Whitespace()
    if pair:
        inner.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
        )
        options = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", **options}
    names = ["input_ids", "token_type_ids", "attention_mask"] if pair else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        model_input_names=names,
        tokenizer_object=inner,
        unk_token="[UNK]",
        eos_token="[SEP]",
        model_max_length=limit,
        **options,
    )


def bert(folder: Path, labels: int = 1, seed: int = 0, **options: Any) -> Path:
    """A random reader of pairs, large enough weights for scores to differ."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        num_labels=labels,
        initializer_range=0.5,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer(**options).save_pretrained(folder)
    return folder


class Records:
    """Records in memory."""

    fingerprint = "0" * 64

    def __init__(self, records: list[Record]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def record(self, index: int) -> Record:
        return self.records[index]


RECORDS = Records([Record("a b c", "d e", "f"), Record("g", "h i j", "k l m n"), Record("o p", "q", "r s")])
ALL = np.arange(3)


def encode(model: RewardModel, record: Record) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    return model.encode(record.prompt, record.chosen, record.rejected)


def words(encoded: dict[str, list[int]]) -> str:
    return " ".join(WORDS[n] for n in encoded["input_ids"])


def test_a_prompt_and_a_response_are_a_pair(tmp_path: Path) -> None:
    """Its own tokenizer joins them, token types included."""
    model = RewardModel(str(bert(tmp_path / "m")), CPU)
    chosen, rejected = encode(model, RECORDS.record(0))
    assert words(chosen) == "[CLS] a b c [SEP] d e [SEP]"
    assert words(rejected) == "[CLS] a b c [SEP] f [SEP]"
    assert chosen["token_type_ids"] == [0, 0, 0, 0, 0, 1, 1, 1]


def test_scores_are_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of two with padding against one response at a time through the plain model."""
    monkeypatch.setattr(reward_model, "BATCH", 2)
    monkeypatch.setattr(reward_model, "BLOCK", 2)
    path = bert(tmp_path / "m")
    plain = BertForSequenceClassification.from_pretrained(path).eval()
    expected = [
        float(plain(**tokenizer()(record.prompt, response, return_tensors="pt")).logits.detach())
        for record in RECORDS.records
        for response in (record.chosen, record.rejected)
    ]
    ours = Rewards(str(path), RECORDS).get(ALL)
    np.testing.assert_allclose(ours.reshape(-1), expected, rtol=1e-5, atol=1e-6)
    assert ours.std() > 0.01


def test_what_does_not_fit_loses_the_prompts_beginning(tmp_path: Path) -> None:
    """With twelve tokens, the prompt's last words and the whole response stay. A response that fills all
    twelve is cut with its prompt. If the tokenizer has no limit, the model's sixteen
    positions are the limit."""
    model = RewardModel(str(bert(tmp_path / "m")), CPU)
    long = Record("a b c d e f g h i j", "k l m", "k l m n o p q r s t u v w")
    chosen, rejected = encode(model, long)
    assert words(chosen) == "[CLS] e f g h i j [SEP] k l m [SEP]"
    assert len(rejected["input_ids"]) == 12
    assert words(rejected).endswith("u v w [SEP]")
    free = RewardModel(str(bert(tmp_path / "free", limit=int(1e30))), CPU)
    assert len(encode(free, long)[1]["input_ids"]) == 16


@pytest.mark.parametrize("name", ["words", *MADE, "python"])
@given(text=st.text("ab </s>[]", min_size=1).filter(str.strip), limit=st.integers(9, 40))
def test_control_tokens_in_a_pair_are_text(name: str, text: str, limit: int) -> None:
    """The frame of special tokens and segments is that of ordinary texts, and the contents are text."""
    made: Any = {**MADE, "words": tokenizer(), "python": ByT5Tokenizer()}[name]
    model = RewardModel.__new__(RewardModel)
    model.tokenizer, model._limit, model._template = made, 10_000, Template(made)
    made.truncation_side = "left"
    for end in ("</s>", "[SEP]"):
        prompt, response = f"a{end}b", f"b {text}{end}{text}"
        whole, _ = model.encode(prompt, response, "a")
        mask = made("a", "a", return_special_tokens_mask=True)["special_tokens_mask"]
        control = {*made.all_special_ids} - {made.unk_token_id}
        assert sum(n in control for n in whole["input_ids"]) == sum(mask)
        contents = [n for n in whole["input_ids"] if n not in control]
        assert contents == [
            n for part in (prompt, response) for n in token_ids(made, [model._template.mark(part)])[0]
        ]
        model._limit = limit
        cut, _ = model.encode(prompt, response, "a")
        assert {len(values) for values in cut.values()} == {min(limit, len(whole["input_ids"]))}
        model._limit = 10_000
    plain, _ = model.encode("a b", "b a", "a")
    marked = model._marked(("a b", "b a"), {})
    assert marked == plain


def test_conversations(tmp_path: Path) -> None:
    """The chat template makes one text; without one it is a pair in the Human/Assistant form."""
    talk = Record((Message("user", "a b"),), "c", "d")
    plain = RewardModel(str(bert(tmp_path / "plain")), CPU)
    assert words(encode(plain, talk)[0]) == "[CLS] Human : a b Assistant : [SEP] c [SEP]"
    template = (
        "{% for m in messages %}< {{ m.content }} > {% endfor %}{% if add_generation_prompt %}< {% endif %}"
    )
    chat = RewardModel(str(bert(tmp_path / "chat", chat_template=template)), CPU)
    assert words(encode(chat, talk)[0]) == "< a b > < c >"
    assert words(encode(chat, RECORDS.record(0))[0]) == "[CLS] a b c [SEP] d e [SEP]"


def test_two_outputs_are_log_odds(tmp_path: Path) -> None:
    path = bert(tmp_path / "m", labels=2)
    logits = (
        BertForSequenceClassification.from_pretrained(path)
        .eval()(**tokenizer()("a b c", "d e", return_tensors="pt"))
        .logits[0]
    )
    ours = Rewards(str(path), RECORDS).get(ALL)[0, 0]
    assert float(ours) == pytest.approx(float((logits[1] - logits[0]).detach()), rel=1e-5)


def test_decoders_read_their_last_token(tmp_path: Path) -> None:
    """A tokenizer without a padding token takes the end of text for it; padding does not change a score."""
    words = tokenizer(pair=False, limit=16)
    save_reward_model(tmp_path / "m", words, n_positions=16, initializer_range=0.5)
    model = RewardModel(str(tmp_path / "m"), CPU)
    encoded = [each for record in RECORDS.records for each in encode(model, record)]
    alone = np.concatenate([model.score([each]) for each in encoded])
    np.testing.assert_allclose(model.score(encoded), alone, rtol=1e-5, atol=1e-6)


def test_scores_are_kept_and_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process reads the first one's scores; the model runs only for missing rows."""
    path, calls = str(bert(tmp_path / "m")), []
    first = Rewards(path, RECORDS, tmp_path / "cache")
    expected = first.get(ALL[:2])
    monkeypatch.setattr(
        RewardModel, "score", lambda self, encoded: calls.append(1) or np.ones(len(encoded), np.float32)
    )
    again = Rewards(path, RECORDS, tmp_path / "cache")
    np.testing.assert_array_equal(again.get(ALL[:2]), expected)
    assert not calls
    np.testing.assert_array_equal(again.get(ALL[2:]), [[1.0, 1.0]])
    assert len(calls) == 1


def test_a_kill_loses_no_more_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one record. A process is killed in the third block; a second process computes only the third,
    and has the bits of a process that was not killed."""
    monkeypatch.setattr(reward_model, "BLOCK", 1)
    path, scored = str(bert(tmp_path / "m")), []
    whole = Rewards(path, RECORDS).get(ALL)
    score = Rewards._score

    def record(self: Rewards, rows: Any) -> Any:
        scored.append(rows.tolist())
        if len(scored) == 3:
            raise KeyboardInterrupt
        return score(self, rows)

    monkeypatch.setattr(Rewards, "_score", record)
    with pytest.raises(KeyboardInterrupt):
        Rewards(path, RECORDS, tmp_path / "cache").get(ALL)
    np.testing.assert_array_equal(Rewards(path, RECORDS, tmp_path / "cache").get(ALL), whole)
    assert scored == [[0], [1], [2], [2]]


def test_a_model_is_known_by_its_files(tmp_path: Path) -> None:
    """A copy of the model continues the cache; other weights are refused if the cache has scores."""
    one, two = bert(tmp_path / "one"), bert(tmp_path / "two", seed=1)
    expected = Rewards(str(one), RECORDS, tmp_path / "cache").get(ALL)
    shutil.copytree(one, tmp_path / "copy")
    copy = Rewards(str(tmp_path / "copy"), RECORDS, tmp_path / "cache")
    np.testing.assert_array_equal(copy.get(ALL), expected)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    with pytest.raises(ModelError, match=r"differs from the model that wrote rewards-.*"):
        Rewards(str(two), RECORDS, tmp_path / "cache").get(ALL)
    assert not np.allclose(Rewards(str(two), RECORDS).get(ALL), expected)


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    """Nothing there, a language model without a trained head, three outputs, scores that are no numbers."""
    with pytest.raises(ModelError, match=r"reward_model = .*: no such folder; give one"):
        _ = Rewards(str(tmp_path / "nothing"), RECORDS).fingerprint
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(WORDS), n_positions=16, n_embd=16, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path / "lm")
    tokenizer(pair=False).save_pretrained(tmp_path / "lm")
    with pytest.raises(ModelError, match=r"this is not a sequence classification model: the checkpoint"):
        Rewards(str(tmp_path / "lm"), RECORDS).get(ALL)
    with pytest.raises(ModelError, match="has 3 outputs; a reward model must have one"):
        Rewards(str(bert(tmp_path / "three", labels=3)), RECORDS).get(ALL)
    broken = BertForSequenceClassification.from_pretrained(bert(tmp_path / "nan"))
    with torch.no_grad():
        broken.classifier.weight.fill_(3e38)  # finite, but its products are not
    broken.save_pretrained(tmp_path / "nan")
    with pytest.raises(ModelError, match="gives a response of record 1 a score that is not finite"):
        Rewards(str(tmp_path / "nan"), RECORDS).get(ALL[1:])
