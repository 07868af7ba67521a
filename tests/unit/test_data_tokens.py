import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from prefed.core import Key
from prefed.data import DataError, Message, PolicyEncoder, Record, Template, TokenSet, TokenWriter
from prefed.data.errors import ErrorCollector, RowLocation
from prefed.data.synthetic import corpus
from prefed.data.tokens import tokenizer_digest
from preferences import CHATML, merging, tokenizer

EOS, BOS, END = 0, 1, 4


def write(
    folder, records, made=None, *, max_length=512, too_long="drop", flipped=None, errors=None, **options
):
    made = made or tokenizer()
    folder.mkdir(exist_ok=True)
    encoder = PolicyEncoder(made, Template(made), max_length=max_length, too_long=too_long)
    writer = TokenWriter(folder, encoder, errors=errors or ErrorCollector(), **options)
    try:
        for row, record in enumerate(records, 1):
            writer.add(record, RowLocation("x.jsonl", row), record.category)
        writer.finish(None if flipped is None else np.array(flipped))
    finally:
        writer.close()
    return TokenSet(folder), writer


def text(ids, made=None):
    return (made or tokenizer()).decode(ids)


RECORDS = [
    Record("Q:", " yes", " no", margin=0.5, category="a"),
    Record("Grüße ☃", " ja", " nein, danke", extra={"n": 3}, category="b"),
    Record((Message("user", "Hi"),), "Hello", "Go away", category="a"),
]


def test_prompt_and_response_make_the_text(tmp_path):
    """With one token per byte, ids decode to the texts. Each response ends with the end-of-text token."""
    tokens, _ = write(tmp_path / "t", RECORDS)
    assert len(tokens) == 3
    pair = tokens.pair(0)
    assert (text(pair.prompt), text(pair.chosen), text(pair.rejected)) == ("Q:", " yes<eos>", " no<eos>")
    assert [ids.dtype for ids in pair] == [np.int32] * 3
    assert text(tokens.pair(1).prompt) == "Grüße ☃"
    assert text(tokens.pair(2).prompt) == "\n\nHuman: Hi\n\nAssistant:"
    assert text(tokens.pair(2).chosen) == " Hello<eos>"
    assert tokens.lengths.tolist() == [[len(part) for part in tokens.pair(k)] for k in range(3)]
    assert tokens.lengths[0].tolist() == [2, 5, 4]
    assert [tokens.record(k) for k in range(3)] == RECORDS
    assert np.isnan(tokens.margins).tolist() == [False, True, True]
    assert tokens.margins[0] == 0.5
    assert [tokens.category_names[k] for k in tokens.categories] == ["a", "b", "a"]


def test_batches_do_not_change_the_result(tmp_path):
    """There are more records than in one batch, and their lengths differ."""
    records = [Record(f"Q{k}", " a" * (1 + k % 7), " b", category="c") for k in range(600)]
    tokens, _ = write(tmp_path / "t", records)
    assert tokens.lengths[:, 1].tolist() == [2 * (1 + k % 7) + 1 for k in range(600)]
    for k in (0, 255, 256, 511, 512, 599):
        assert tokens.record(k) == records[k]
        assert text(tokens.pair(k).prompt) == f"Q{k}"


def test_merging_tokens_concatenate_to_the_whole(tmp_path):
    """A byte-level BPE with merges cuts before blanks, so that a response that starts with one is cut alike.

    Oracle: the tokenizer's own ids of the whole text.
    """
    made = merging()
    texts = [text.split("Assistant:") for text in corpus(Key(1), 20)]
    records = [Record(prompt + "Assistant:", reply, " something else") for prompt, reply in texts]
    tokens, _ = write(tmp_path / "t", records, made)
    for k, record in enumerate(records):
        pair = tokens.pair(k)
        whole = made(record.prompt + record.chosen)["input_ids"]
        assert [*pair.prompt, *pair.chosen] == [*whole, EOS]
        assert len(pair.chosen) < 2 * len(record.chosen) / 3


def test_beginning_of_text_belongs_to_the_prompt(tmp_path):
    made = tokenizer(bos=True)
    tokens, _ = write(tmp_path / "t", [*RECORDS, Record("", "a", "b")], made)
    assert tokens.pair(0).prompt.tolist()[0] == BOS
    assert BOS not in tokens.pair(0).chosen
    whole = made("Q: yes")["input_ids"]
    assert [*tokens.pair(0).prompt, *tokens.pair(0).chosen] == [*whole, EOS]
    assert tokens.pair(3).prompt.tolist() == [BOS]


def test_an_empty_prompt_has_one_token(tmp_path):
    tokens, _ = write(tmp_path / "t", [Record("", "a", "b")])
    assert tokens.pair(0).prompt.tolist() == [EOS]


def test_a_chat_template_brings_its_own_special_tokens(tmp_path):
    """No second beginning-of-text token, and the end-of-text token follows the template's end of turn."""
    made = tokenizer(bos=True, chat="<bos>" + CHATML)
    tokens, _ = write(tmp_path / "t", [RECORDS[2]], made)
    prompt, chosen, _ = tokens.pair(0)
    assert prompt.tolist().count(BOS) == 1
    assert chosen.tolist()[-2:] == [END, EOS]
    assert made.decode(prompt) == "<bos><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_an_end_of_turn_that_ends_the_text_is_not_doubled(tmp_path):
    made = tokenizer(chat=CHATML, eos="<|im_end|>")
    tokens, _ = write(tmp_path / "t", [RECORDS[2]], made)
    assert tokens.pair(0).chosen.tolist().count(END) == 1
    assert tokens.pair(0).chosen[-1] == END


def test_a_long_prompt_keeps_its_end(tmp_path):
    """max_length is 10 and the longer response has 5 tokens with its end: 5 are left for the prompt."""
    record = Record("0123456789", " yes", " no")
    tokens, writer = write(tmp_path / "t", [record], max_length=10)
    pair = tokens.pair(0)
    assert text(pair.prompt) == "56789"
    assert (text(pair.chosen), text(pair.rejected)) == (" yes<eos>", " no<eos>")
    assert (writer.truncated, writer.too_long) == (1, 0)
    assert tokens.record(0).prompt == "0123456789"


def test_a_long_prompt_keeps_its_beginning_of_text(tmp_path):
    tokens, _ = write(
        tmp_path / "t", [Record("0123456789", " yes", " no")], tokenizer(bos=True), max_length=10
    )
    assert tokens.pair(0).prompt.tolist()[0] == BOS
    assert text(tokens.pair(0).prompt[1:]) == "6789"
    only, _ = write(tmp_path / "u", [Record("0123456789", " yes", " no")], tokenizer(bos=True), max_length=6)
    assert only.pair(0).prompt.tolist() == [BOS]


@pytest.mark.parametrize(("max_length", "pairs"), [(6, 1), (5, 0)])
def test_a_response_is_never_cut(tmp_path, max_length, pairs):
    """' yes' and its end are 5 tokens: of 6 tokens one is left for the prompt, of 5 none."""
    records = [Record("Q:", " no", " yes")]
    tokens, writer = write(tmp_path / "t", records, max_length=max_length)
    assert (len(tokens), writer.too_long) == (pairs, 1 - pairs)


def test_a_long_response_can_be_an_error(tmp_path):
    records = [Record("Q:", " no", " ye"), Record("Q:", " no", " yes")]
    with pytest.raises(DataError, match=r"x.jsonl, row 2: rejected has 5 tokens, but max_length is 5"):
        write(tmp_path / "t", records, max_length=5, too_long="error")


def test_flipped_rows_swap_everywhere(tmp_path):
    tokens, _ = write(tmp_path / "t", RECORDS, flipped=[False, True, False])
    straight, _ = write(tmp_path / "u", RECORDS)
    assert tokens.record(1) == RECORDS[1].swapped()
    assert text(tokens.pair(1).chosen) == " nein, danke<eos>"
    assert text(tokens.pair(1).rejected) == " ja<eos>"
    assert tokens.lengths[1].tolist() == [len(part) for part in tokens.pair(1)]
    assert tokens.lengths[1].tolist() == straight.lengths[1][[0, 2, 1]].tolist()
    assert (tokens.orientations ^ straight.orientations).tolist() == [0, 1, 0]
    assert (tokens.pairs == straight.pairs).all()
    assert tokens.pair(0).chosen.tolist() == straight.pair(0).chosen.tolist()


def test_codes_of_prompts_and_pairs(tmp_path):
    """``pairs`` does not depend on which response is chosen; ``orientations`` does."""
    records = [
        Record("Q", "a", "b"),
        Record("Q", "b", "a"),
        Record("Q", "a", "c"),
        Record("R", "a", "b"),
        Record((Message("user", "Q"),), "a", "b"),
    ]
    tokens, _ = write(tmp_path / "t", records)
    assert tokens.prompts[0] == tokens.prompts[1] == tokens.prompts[2]
    assert len({int(n) for n in tokens.prompts}) == 3
    assert tokens.pairs[0] == tokens.pairs[1]
    assert len({int(n) for n in tokens.pairs}) == 4
    assert tokens.orientations[0] != tokens.orientations[1]


def test_the_fingerprint_is_of_the_content(tmp_path):
    """It is equal for equal data in another folder. It differs for another text, tokenizer, order or flip."""
    first, _ = write(tmp_path / "a", RECORDS)
    assert write(tmp_path / "b", RECORDS)[0].fingerprint == first.fingerprint
    others = [
        write(tmp_path / "c", RECORDS[::-1])[0],
        write(tmp_path / "d", RECORDS, tokenizer(bos=True))[0],
        write(tmp_path / "e", RECORDS, flipped=[True, False, False])[0],
        write(tmp_path / "f", [RECORDS[0], RECORDS[1], Record(RECORDS[2].prompt, "Hello!", "Go away")])[0],
    ]
    assert len({tokens.fingerprint for tokens in [first, *others]}) == 5


def test_reads_from_threads_and_forks(tmp_path):
    """Each reader gets its own row while others read."""
    records = [Record(f"Q{k}", f" yes {k}", f" no {k}") for k in range(200)]
    tokens, _ = write(tmp_path / "t", records)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokens.record, range(200))) == records
    child = os.fork()
    right = all(tokens.record(k) == records[k] for k in range(200))
    if child == 0:
        os._exit(0 if right else 1)
    assert right
    assert os.waitpid(child, 0)[1] == 0


def test_arrays_can_be_written_to(tmp_path):
    tokens, _ = write(tmp_path / "t", RECORDS)
    tokens.pair(0).prompt[0] = 9
    assert tokens.pair(0).prompt[0] != 9


def test_indices_are_checked(tmp_path):
    tokens, _ = write(tmp_path / "t", RECORDS)
    for index in (-1, 3):
        with pytest.raises(IndexError, match=r"no row -?\d+: the data has 3 rows, counted from 0"):
            tokens.pair(index)
        with pytest.raises(IndexError):
            tokens.record(index)


def test_a_damaged_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"tokens.json is missing"):
        TokenSet(tmp_path)
    write(tmp_path / "t", RECORDS)
    column = tmp_path / "t" / "offsets.i64"
    column.write_bytes(column.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"offsets.i64 is damaged"):
        TokenSet(tmp_path / "t")
    manifest = tmp_path / "t" / "tokens.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 99}))
    with pytest.raises(DataError, match="t has version 99 of the token format, not 1; delete it"):
        TokenSet(tmp_path / "t")


def test_a_tokenizer_must_end_texts(tmp_path):
    with pytest.raises(DataError, match="no end-of-text token"):
        write(tmp_path / "t", RECORDS, tokenizer(eos=None))


def test_the_digest_of_a_tokenizer_does_not_depend_on_its_use():
    made = tokenizer()
    before = tokenizer_digest(made)
    made(["some text", "x"], padding=True, truncation=True, max_length=3)
    assert tokenizer_digest(made) == before == tokenizer_digest(tokenizer())
    assert len({before, tokenizer_digest(tokenizer(bos=True)), tokenizer_digest(tokenizer(chat=CHATML))}) == 3
