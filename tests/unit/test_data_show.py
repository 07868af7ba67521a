"""What `prefed data --show` prints: the tokens of training, decoded and marked."""

# ruff: noqa: E501 - one case a line
import io

import pytest
from rich.console import Console

from prefed.core import Key
from prefed.data import DataConfig, SelectorConfig, build_dataset
from prefed.data.show import Piece, first_pairs
from prefed.ui.pages.terminal import print_first_pairs
from preferences import CHATML, jsonl, merging, tokenizer

CHAT = [
    {
        "prompt": [{"role": "user", "content": f"Q{k}"}],
        "chosen": [{"role": "assistant", "content": f"yes {k}"}],
        "rejected": [{"role": "assistant", "content": f"no {k}"}],
    }
    for k in range(3)
]
TEXT = [{"prompt": f"Q{k}:", "chosen": f" yes {k}", "rejected": f" no {k}"} for k in range(3)]
THUMBS = [{"prompt": f"Q{k}:", "completion": f" yes {k}", "label": k > 0} for k in range(3)]


def show(tmp_path, rows, words, count=1, selector=None, rejected=True, **settings):
    config = DataConfig(
        train=str(jsonl(tmp_path / "rows.jsonl", rows)),
        partition={"by": "iid", "clients": 1},
        test_fraction=0.0,
        **settings,
    )
    dataset = build_dataset(config, words, Key(0), tmp_path / "t", selector)
    shown = first_pairs(dataset, count, config, words, selector, rejected=rejected)
    return dataset, shown


def printed(shown):
    out = io.StringIO()
    print_first_pairs(shown, Console(file=out, width=40))
    return out.getvalue()


CASES = {
    "a conversation": (
        *(CHAT, {}, "chat template"),
        ["[[<|im_start|>]]user\nQ0[[<|im_end|>]]\n[[<|im_start|>]]assistant\n"],
        ["{{yes 0[[<|im_end|>]][[<eos>]]}}", "{{no 0[[<|im_end|>]][[<eos>]]}}"],
    ),
    # The responses with their ends have 7 and 6 tokens, so 2 of the prompt's 3 fit.
    "a cut prompt": (TEXT, {"max_length": 9}, "plain text, unchanged", ["[[1 token cut]]0:"], ["{{ yes 0[[<eos>]]}}", "{{ no 0[[<eos>]]}}"]),
    "flipped": (TEXT, {"flip": ("client-0",)}, "plain text, unchanged", ["Q0:"], ["{{ no 0[[<eos>]]}}", "{{ yes 0[[<eos>]]}}"]),
    "rejected is not read": (TEXT, {"rejected": False}, "plain text, unchanged", ["Q0:"], ["{{ yes 0[[<eos>]]}}", " no 0[[<eos>]]"]),
    "a thumb": (THUMBS, {}, "plain text, unchanged", ["Q0:"], ["{{ yes 0[[<eos>]]}}"]),
    # Five of the 10 and 9 tokens of the texts with their ends fit after the end-of-text token.
    "whole texts": (TEXT, {"score": "whole", "max_length": 6}, "whole texts", ["[[<eos>]]"], ["{{Q0: y}}[[5 tokens cut]]", "{{Q0: n}}[[4 tokens cut]]"]),
    # "no 0" is alphabetically first, and rejected: shown as A it is answered with B.
    "a selector": (TEXT, {"selector": SelectorConfig()}, "selector question", ["Query: Q0:"], ["\nA: no 0\nB: yes 0\nBetter: {{B}}", "\nA: yes 0\nB: no 0\nBetter: {{A}}"]),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "settings", "form", "prompt", "responses"), CASES.values(), ids=CASES)
def test_tokens_as_text(tmp_path, rows, settings, form, prompt, responses):
    """One token per byte, so each text can be read off its row; the ids are those of the token set."""
    words = tokenizer(chat=CHATML if rows is CHAT else None)
    dataset, (client,) = show(tmp_path, rows, words, **settings)
    assert (client.train, [pair.row for pair in client.pairs]) == (3, [1])
    (pair,) = client.pairs
    assert pair.form == form
    if "selector" not in settings:
        stored = [part.tolist() for part in dataset.tokens.pair(0) if len(part)]
        assert [list(part.ids) for part in pair.parts] == stored
    blank = " " * 15
    parts = zip(pair.parts, prompt + responses, strict=True)
    lines = [f"    {part.name:<11}{text}".replace("\n", "\n" + blank) for part, text in parts]
    assert "\n".join(lines) + "\n" in printed([client])


def test_text_that_looks_special_is_not_marked(tmp_path):
    """`<eos>` in a text is its bytes where the tokenizer splits special tokens, and is printed without marks.

    The pieces are the text, and the special token at its end. Control characters are escaped.
    """
    words = tokenizer()
    words.split_special_tokens = True
    row = {"prompt": "Q:", "chosen": " <eos>\x1b[2J", "rejected": " no"}
    _, (client,) = show(tmp_path, [row], words)
    assert client.pairs[0].parts[1].pieces == (
        Piece(text=" <eos>\x1b[2J", scored=True),
        Piece(text="<eos>", special=True, scored=True),
    )
    assert "{{ <eos>\\x1b[2J[[<eos>]]}}" in printed([client])


@pytest.mark.parametrize("words", [tokenizer(bos=True, chat=CHATML), merging()], ids=["bytes", "merging"])
def test_pieces_join_to_the_text_of_the_ids(tmp_path, words):
    """Nothing is lost between pieces: their texts are those of all ids decoded at once."""
    _, (client,) = show(tmp_path, [*CHAT, *TEXT], words, count=6)
    assert len(client.pairs) == 6
    for pair in client.pairs:
        for part in pair.parts:
            assert "".join(piece.text for piece in part.pieces) == words.decode(list(part.ids))
            scored = [piece.scored for piece in part.pieces]
            assert all(scored) if part.name != "prompt" else not any(scored)
