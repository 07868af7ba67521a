"""What the benchmarks share: pairs in memory, models, clocks."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import transformers
from peft import LoraConfig

from prefed.data import DataConfig, Encoder, Pair, PolicyEncoder, Record, Template, TokenSet
from prefed.data.encoding import Encoded
from prefed.data.errors import ErrorCollector
from prefed.data.sources import ReadCounts, read_records
from prefed.models.matmul import matmul

if TYPE_CHECKING:
    from prefed.engines import Job
    from prefed.train.pair_trainer import PairTrainerFactory

T = TypeVar("T")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared"
DATA = SHARED / "data" / "hh_harmless.train.jsonl.gz"
TOKENIZER = SHARED / "models" / "tiny-lm"


class Pairs(TokenSet):
    """Tokenised pairs in memory."""

    def __init__(self, pairs: list[Pair]) -> None:
        self._pairs, self.letters = pairs, None
        self.lengths = np.array([[len(p.prompt), len(p.chosen), len(p.rejected)] for p in pairs], np.int32)
        self.margins = np.full(len(pairs), np.nan, np.float32)

    def __len__(self) -> int:
        return len(self._pairs)

    def pair(self, index: int, other: int | None = None) -> Pair:
        """One pair."""
        return self._pairs[index]


def records(path: Path) -> Iterator[Record]:
    """The pairs of any file that prefed reads."""
    if not path.exists():
        raise SystemExit(
            f"{path}: no such file; give --data (experiments/hh_harmless/prepare.py writes one) and "
            "--tokenizer (a folder or a hub name)"
        )
    config = DataConfig.model_validate({"train": path, "partition": {"by": "iid", "clients": 1}})
    errors, ((role, name, source),) = ErrorCollector(), config.sources()
    for record, _ in read_records(source, config, role, name, errors, ReadCounts()):
        yield record
    errors.raise_if_any()


def save_picture(chart: Any, out: Path) -> None:
    """Draw a chart of prefed for the documentation: a small file that names no other place."""
    import matplotlib

    from prefed.ui.pages.plot_file import save

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        save(chart, out)
    if out.suffix == ".svg":
        text = re.sub(r"<metadata>.*?</metadata>", "", out.read_text(), flags=re.DOTALL)
        # Nobody sees a thousandth of a point, and a reader has no list of fonts.
        for long, short in (
            (r"\n\s+", "\n"),
            (r"(\d\.\d\d)\d+", r"\1"),
            ("font-family: [^;]*,", "font-family:"),
        ):
            text = re.sub(long, short, text)
        out.write_text(text)


def encoded(path: Path, encoder: Encoder, limit: int) -> list[Pair]:
    """The first pairs as ids; those that do not fit are left out."""
    outcomes = (encoder.encode([record])[0] for record in records(path))
    fitting = (each for each in outcomes if isinstance(each, Encoded))
    return [
        Pair(*(np.array(ids, np.int32) for ids in (each.prompt, *each.branches)))
        for each in islice(fitting, limit)
    ]


def load_pairs(path: Path, tokenizer: Path, max_length: int, limit: int) -> Pairs:
    """Pairs for a policy; an over-long prompt keeps its end, a response that cannot fit drops its pair."""
    encode = transformers.AutoTokenizer.from_pretrained(tokenizer)
    encoder = PolicyEncoder(encode, Template(encode), max_length=max_length, too_long="drop")
    return Pairs(encoded(path, encoder, limit))


def trainers_of(job: Job) -> PairTrainerFactory:
    """The data and the model of a job that was built in this process."""
    from prefed.train.pair_trainer import PairTrainerFactory

    assert isinstance(job.trainers, PairTrainerFactory)
    return job.trainers


def parse_with_model(parser: argparse.ArgumentParser, default: str) -> argparse.Namespace:
    """Parse with the options that choose a model; ``tokenizer`` and ``shape`` are those of ``--model``."""
    parser.add_argument("--shape", default=default, help="random weights of a named shape")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="for a shape")
    parser.add_argument("--model", type=Path, help="instead of a shape: a folder with a model and tokenizer")
    args = parser.parse_args()
    if args.model:
        args.tokenizer, args.shape = args.model, args.model.resolve().name
    return args


def base_model(args: argparse.Namespace) -> Any:
    """The model that the options choose, in fp32 and without dropout."""
    if not args.model:
        return shape(args.shape)
    config = transformers.AutoConfig.from_pretrained(args.model)
    quiet = {name: 0.0 for name in config.to_dict() if name.endswith(("pdrop", "dropout"))}
    return transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, use_cache=False, **quiet
    )


def shape(name: str) -> Any:
    """A randomly initialised model of a named shape, without dropout."""
    torch.manual_seed(0)
    quiet: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    if name in ("tiny", "gpt2-small-vocab"):
        vocabulary = 4096 if name == "tiny" else 8192
        config: Any = transformers.GPT2Config(
            vocab_size=vocabulary, n_positions=512, n_embd=256, n_layer=4, n_head=4, **quiet
        )
    elif name == "distilgpt2":
        config = transformers.GPT2Config(n_layer=6, **quiet)
    elif name == "llama-4k":
        config = transformers.LlamaConfig(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
    elif name in ("llama", "llama-8k"):
        config = transformers.LlamaConfig(
            vocab_size=32000 if name == "llama" else 8192,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            use_cache=False,
        )
    elif name == "llama-wide":
        config = transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=2,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=True,
            use_cache=False,
        )
    elif name in ("qwen2-0.5b", "qwen2-1.5b"):
        small = name == "qwen2-0.5b"
        config = transformers.Qwen2Config(
            vocab_size=151936,
            hidden_size=896 if small else 1536,
            intermediate_size=4864 if small else 8960,
            num_hidden_layers=24 if small else 28,
            num_attention_heads=14 if small else 12,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_cache=False,
        )
    else:
        known = (
            "tiny, gpt2-small-vocab, distilgpt2, llama, llama-4k, llama-8k, llama-wide, qwen2-0.5b or -1.5b"
        )
        raise SystemExit(f"no shape {name!r}: {known}")
    config.bos_token_id = config.eos_token_id = 0
    config.pad_token_id = 1
    return transformers.AutoModelForCausalLM.from_config(config)


def lora_config(model: Any, targets: list[str]) -> LoraConfig:
    """The LoRA that all steps train: rank 8, alpha 16, no dropout."""
    return LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        target_modules=targets,
        fan_in_fan_out=model.config.model_type == "gpt2",
        task_type="CAUSAL_LM",
    )


def clock() -> float:
    """CPU seconds of this process. With a GPU: wall seconds, once all its work is done."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def cpu_ms(work: Callable[[], object]) -> float:
    """Milliseconds of :func:`clock` spent in ``work``."""
    return timed(work)[0]


def timed(work: Callable[[], T], now: Callable[[], float] = clock) -> tuple[float, T]:
    """Milliseconds of a clock in seconds spent in ``work``, and what it returns."""
    start = now()
    result = work()
    return 1e3 * (now() - start), result


class Memory:
    """GPU megabytes that a work takes beyond what was there before it; the most of all its turns."""

    def __init__(self) -> None:
        self.most: dict[str, float] = {}

    def of(self, name: str, work: Callable[[], T]) -> T:
        """``work()``, noted under ``name``."""
        if not torch.cuda.is_available():
            return work()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        self.most[name] = max(self.most.get(name, 0.0), (torch.cuda.max_memory_allocated() - before) / 2**20)
        return result

    def column(self, name: str) -> str:
        """The figure of ``name`` as a column; empty without a GPU."""
        return f"  {self.most[name]:9.0f} MiB" if name in self.most else ""


def matmul_rate(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> float:
    """GFLOP/s of products ``[m, k] @ [n, k].T``, the best of eight by PyTorch's own and prefed's each."""
    a, b = (torch.randn(rows, k, dtype=dtype, device=DEVICE) for rows in (m, n))
    best = min(cpu_ms(partial(multiply, a, b.t())) for multiply in (torch.mm, matmul) for _ in range(8))
    return 2 * m * n * k / best / 1e6


def matmul_peak(*shapes: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> float:
    """GFLOP/s of the fastest of products (m, n, k); one of 2,048 in each direction if left out."""
    return max(matmul_rate(*shape, dtype=dtype) for shape in shapes or ((2048, 2048, 2048),))
