"""Tokenizers that put a space before texts, as SentencePiece's do, made in place."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from prefed.core import Key
from prefed.data.synthetic import corpus

TEXTS = list(corpus(Key(1), 20))
SPECIAL = ["<unk>", "<s>", "</s>", "[/INST]"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def llama(normalizer: Any, pre_tokenizer: Any, *, strip: bool = True) -> Any:
    """A BPE with merges and a token for every byte, as SentencePiece's is converted."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    # Words apart, or a text would be one token.
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁[^▁]*"), "isolated")
    backend.train_from_iterator(corpus(Key(0), 300), trainers.BpeTrainer(vocab_size=300, show_progress=False))
    state = json.loads(backend.to_str())["model"]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *BYTES, *state["vocab"]])}
    merges = [tuple(pair) for pair in state["merges"]]
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)] if strip else text)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", extra_special_tokens=["[/INST]"]
    )


def blank() -> Any:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def metaspace(scheme: str, *, split: bool = False) -> Any:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


def unigram(scheme: str) -> Any:
    """As T5's: a piece starts where a word starts, and a text without a piece is unknown."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = metaspace(scheme, split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        unk_token="<unk>",
        initial_alphabet=["A", "B"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


MADE = {
    "llama 2": llama(blank(), None),
    "metaspace always": llama(None, metaspace("always")),
    "metaspace first": llama(None, metaspace("first")),
    "metaspace never": llama(None, metaspace("never"), strip=False),
    "unigram always": unigram("always"),
    "unigram first": unigram("first"),
}
"""Tokenizers by where they put a space; ``[/INST]`` is one of their special tokens."""
