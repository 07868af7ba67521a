"""Completions per second of batches, compared with ``model.generate`` called prompt by prompt, on one core.

    OMP_NUM_THREADS=1 python benchmarks/completions.py --shape tiny
    OMP_NUM_THREADS=1 python benchmarks/completions.py --shape distilgpt2
    OMP_NUM_THREADS=1 python benchmarks/completions.py --model FOLDER --bf16 --batch 32
    OMP_NUM_THREADS=1 python benchmarks/completions.py --model FOLDER --batch 32 --server http://localhost:8080/v1

Prompts of equal length, ``--batch`` of them; T 0.7; every completion has ``--tokens`` tokens, since no
end-of-text token ends it. The peer is the same model with its LoRA merged into the weights, so that it pays
for no adapter. Both take the same work in turn; the median ratio of their CPU times is printed, and how
many of their greedy completions are equal.

``--server`` asks a server of the same model instead, as ``[align.endpoint]`` does, ``--batch`` requests at
once; it must know ``ignore_eos`` (llama.cpp, vLLM). Times are wall times then. For llama.cpp on one core:
``taskset -c 1 llama-server -m FILE.gguf --threads 1 --parallel 32 --ctx-size 8192``.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from types import SimpleNamespace
from typing import Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import DEVICE, base_model, clock, parse_with_model, timed

from prefed.align.judge.endpoint import Endpoint
from prefed.config import EndpointConfig
from prefed.core import Key
from prefed.models import LoraSettings, ModelConfig, load_tokenizer, make_backbone
from prefed.models.pretrained import silence_transformers
from prefed.train.generation import Sampling, complete_batch

NEVER = -1
"""An end-of-text token that no model says."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--server", metavar="URL")
    args = parse_with_model(parser, "tiny")
    silence_transformers()
    torch.set_num_threads(1)
    base = base_model(args).to(torch.bfloat16 if args.bf16 else torch.float32)
    base.config.use_cache = True
    base.config.eos_token_id = base.generation_config.eos_token_id = None
    plain = copy.deepcopy(base).to(DEVICE).eval()
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if args.bf16 else "float32"
    config = ModelConfig(name=str(args.model or args.shape), dtype=dtype, lora=LoraSettings(dropout=0.0))
    # No text is read: special tokens are all that is asked of a tokenizer.
    tokens = SimpleNamespace(eos_token_id=NEVER, bos_token_id=NEVER, pad_token_id=NEVER, get_vocab=dict)
    backbone = make_backbone(base, tokens, config, Key(0))
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, base.config.vocab_size, (args.batch, args.length), generator=draw).tolist()
    keys = [Key(0).at("prompt", number) for number in range(args.batch)]

    def batched(temperature: float) -> list[list[int]]:
        how = Sampling(max_tokens=args.tokens, temperature=temperature)
        return [found.tokens for found in complete_batch(backbone, backbone.reference, prompts, how, keys)]

    def one_by_one(temperature: float) -> list[list[int]]:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        rows = []
        with torch.inference_mode():
            for prompt in prompts:
                ids = torch.tensor([prompt], device=DEVICE)
                output = plain.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=args.tokens,
                    pad_token_id=0,
                    **(sampling or {"do_sample": False}),
                )
                rows.append(output[0, args.length :].tolist())
        return rows

    def served(temperature: float) -> list[list[int]]:
        options = {
            "max_tokens": args.tokens,
            "temperature": temperature,
            "extra_body": {"ignore_eos": True, "cache_prompt": False},
        }
        answers = list(endpoint.map(lambda text: endpoint.complete(text, options, {}), texts))
        # Text does not always give back its tokens: the server counts them.
        return [[0] * args.tokens if not answer.ended else [] for answer in answers]

    peer_name, peer_work, now = "one by one", one_by_one, clock
    if args.server:
        tokenizer = load_tokenizer(config)
        texts = [tokenizer.decode(prompt) for prompt in prompts]
        settings = EndpointConfig(model="model", url=args.server, parallel=args.batch)
        endpoint = Endpoint("model", settings, setting="--server", prefix="--")
        peer_name, peer_work, now = "server", served, time.perf_counter
    else:
        greedy, peer = batched(0.0), one_by_one(0.0)
    times: dict[str, list[float]] = {"batched": [], peer_name: []}
    for repeat in range(args.repeats + 1):
        for name, work in (("batched", batched), (peer_name, peer_work)):
            spent, rows = timed(lambda work=work: work(0.7), now)  # type: ignore[misc]
            assert all(len(row) == args.tokens for row in rows), name
            if repeat:
                times[name].append(spent)
    ratio = statistics.median([b / a for a, b in zip(times["batched"], times[peer_name], strict=True)])
    print(
        f"{args.shape}, {dtype}, batch {args.batch}, {args.length} tokens and {args.tokens} new ones, T 0.7"
    )
    for name, values in times.items():
        seconds = statistics.median(values) / 1e3
        rate, tokens = args.batch / seconds, args.batch * args.tokens / seconds
        print(f"  {name:<12} {rate:8.2f} completions/s   {tokens:9.1f} tokens/s   {seconds:7.2f} s")
    print(f"  ratio {ratio:.2f}x")
    if not args.server:
        agree = sum(one == other for one, other in zip(greedy, peer, strict=True))
        print(f"  greedy completions that agree: {agree}/{args.batch}")


if __name__ == "__main__":
    main()
