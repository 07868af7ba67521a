"""Create and briefly pretrain a tiny language model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from prefed.core import Key
from prefed.models.adapter_files import atomic_folder

END = "<|endoftext|>"


def make_tiny(
    folder: Path,
    texts: Iterable[str],
    key: Key,
    *,
    layers: int = 2,
    width: int = 128,
    heads: int = 4,
    vocabulary: int = 512,
    context: int = 128,
    steps: int = 300,
    batch: int = 16,
    lr: float = 3e-3,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> Path:
    """Train a byte-level BPE tokenizer and a GPT-2 model on ``texts``; save them as a Hugging Face folder.

    Args:
        folder: output folder, written atomically.
        texts: documents, one training sequence each.
        key: random key for weights and batches.
        context: maximum sequence length; longer documents are truncated.
        steps: number of optimiser steps (AdamW, one-cycle learning rate).
        batch: documents per step.
        progress: called as ``progress(step, steps, loss)`` after each step.

    Returns:
        ``folder``.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    documents = list(texts)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(documents, vocab_size=vocabulary, special_tokens=[END], show_progress=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=END, bos_token=END, pad_token=END, model_max_length=context
    )
    end = fast.eos_token_id
    rows = [[*ids[: context - 1], end] for ids in fast(documents, add_special_tokens=False)["input_ids"]]
    config = GPT2Config(
        vocab_size=len(fast),
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    with torch.random.fork_rng():
        torch.manual_seed(key.at("weights").number())
        model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    draw = key.at("batches").numpy()
    model.train()
    for step in range(steps):
        chosen = [rows[int(i)] for i in draw.integers(len(rows), size=batch)]
        longest = max(map(len, chosen))
        ids = torch.tensor([row + [end] * (longest - len(row)) for row in chosen])
        labels = torch.tensor([row + [-100] * (longest - len(row)) for row in chosen])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        cycle.step()
        progress(step + 1, steps, float(loss.detach()))
    model.eval()
    with atomic_folder(folder) as partial:
        model.save_pretrained(partial)
        fast.save_pretrained(partial)
    return folder
