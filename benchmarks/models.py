"""Every family of models with every method, against plain transformers and PEFT.

    OMP_NUM_THREADS=1 python benchmarks/models.py --families llama mixtral --methods feddpo fedsdg
    OMP_NUM_THREADS=1 python benchmarks/models.py --results models.jsonl --page docs/models.md

A family is a tiny model of :mod:`zoo`. A method trains for a round on two clients of opposed preferences.
Its model is exported as an adapter, or as a client's folder where no adapter holds it, and merged. What an
export's lines load then scores the clients' pairs, one response in a forward pass. The log-probabilities of
the run must agree with these to 5e-5 nats a token, and differ from those of the base model.

What the file of ``--results`` holds already is not run again. ``--page`` names the page whose tables
are written.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
import zoo
from models_page import FULL, GROUPS, write_page
from tokenizers import ByteLevelBPETokenizer

from prefed import Experiment
from prefed import run as run_experiment
from prefed.core import Owner
from prefed.data.encoding import Template
from prefed.data.response_encoder import ResponseEncoder
from prefed.methods import METHODS
from prefed.models import ModelError, load_client
from prefed.runs.export import Export, write_tensors
from prefed.runs.loaded_run import LoadedRun, load_run
from prefed.train.feedback.choices import ChoiceScores
from prefed.train.feedback.pairs import PairScores
from prefed.train.packed import PackedForward
from prefed.train.tastes import ResponseFeatures

TOLERANCE = 5e-5
"""Nats a token, and logits; a number above 1 by this share of itself."""
END = "<|endoftext|>"


def place(folder: Path) -> None:
    """Pairs of two clients of opposed preferences, and a tokenizer."""
    draw, texts = np.random.default_rng(0), []
    for split, count in (("train", 16), ("test", 6)):
        rows = []
        for number in range(count):
            client = ("left", "right")[number % 2]
            up, down = (word + " we go" * int(draw.integers(3)) for word in (" up", " down"))
            chosen, rejected = (up, down) if client == "left" else (down, up)
            prompt = f"Case {split} {number}:"
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "client": client})
            texts.append(prompt + chosen)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = "Which response is better? Question: Response A: Response B: Answer: A B"
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        [*texts, words], vocab_size=zoo.VOCABULARY, special_tokens=[END], show_progress=False
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=END, bos_token=END, pad_token=END
    )
    fast.save_pretrained(folder / "tokenizer")


def experiment(folder: Path, method: str) -> Experiment:
    """A round of a method over the model in ``folder``."""
    full = method == FULL
    return Experiment.model_validate(
        {
            "seed": 3,
            "rounds": 1,
            "data": {
                "train": str(folder / "train.jsonl"),
                "test": str(folder / "test.jsonl"),
                "partition": {"by": "column", "column": "client"},
                "max_length": 480,
            },
            "model": {
                "name": str(folder / "model"),
                "lora": {"rank": 2, "alpha": 8},
                "train": "full" if full else "lora",
                "variational": {"latent": 4, "widths": (8, 8), "pool": "end"},
            },
            "method": {
                "name": "feddpo" if full else method,
                "lr": 0.003 if full else 0.03,
                "local_steps": 2,
                "batch_size": 4,
            },
            "engine": {"threads": 1},
        }
    )


def logits_of(model: Any, ids: np.ndarray, first: int) -> torch.Tensor:
    """``[n, V]`` log-probabilities that predict the tokens from ``first`` on, one sequence at a time."""
    with torch.inference_mode():
        sequence = torch.from_numpy(ids.astype(np.int64))[None]
        logits: torch.Tensor = model(input_ids=sequence, use_cache=False).logits[0, first - 1 : -1]
    return logits.double().log_softmax(-1)


def oracle(model: Any, run: LoadedRun, rows: np.ndarray) -> np.ndarray:
    """``[n, 2]`` of a plain model: log-probabilities of the responses, or log-odds of the first one."""
    tokens, values = run.trainers.dataset.tokens, []
    for row in rows:
        pair = tokens.pair(int(row))
        for branch in (pair.chosen, pair.rejected):
            logprobs = logits_of(model, np.concatenate([pair.prompt, branch]), len(pair.prompt))
            if tokens.letters is None:
                at = torch.from_numpy(branch.astype(np.int64))[:, None]
                values.append(float(logprobs.gather(1, at).sum()))
            else:
                right = int(branch[-1])
                wrong = next(letter for letter in tokens.letters if letter != right)
                values.append(float(logprobs[-1, right] - logprobs[-1, wrong]))
    return np.array(values).reshape(-1, 2)


def scored(run: LoadedRun, model: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the trainer gives to ``rows``, as :func:`oracle` does: of a model, and of the untouched one."""
    scores = run.trainers.pair_trainer.score(model, rows)
    if isinstance(scores, PairScores):
        return scores.policy, scores.reference
    assert isinstance(scores, ChoiceScores)
    signs = run.trainers.pair_trainer.model.signs(rows)[:, None]
    return signs * scores.orders, signs * scores.baseline


def apart(run: LoadedRun, values: np.ndarray, expected: np.ndarray, rows: np.ndarray) -> float:
    """The largest difference: nats a token of a response, or logits."""
    difference = np.abs(values - expected)
    if run.trainers.dataset.tokens.letters is None:
        difference = difference / run.trainers.dataset.tokens.lengths[rows, 1:]
        expected = expected / run.trainers.dataset.tokens.lengths[rows, 1:]
    worst = (difference / np.maximum(1, np.abs(expected))).max()
    return float("inf") if np.isnan(worst) else float(worst)


def loaded_by(lines: list[str]) -> Any:
    """The model that the lines of an export load."""
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    return names["model"].eval()


def one(folder: Path, method: str) -> dict[str, Any]:
    """What a method gives on the model in ``folder``."""
    out, found = folder / "run", dict[str, Any]()
    try:
        run_experiment(experiment(folder, method), out)
    except ModelError as error:
        return {"refused": str(error).replace(str(folder / "model"), "…")}
    run, base = load_run(out, data=True), transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    base.eval()
    kind = METHODS["feddpo" if method == FULL else method]
    client = "left" if kind.personal else None
    rows = run.trainers.dataset.clients["left"].test
    tensors = run.model(client) if client else next(iter(run.published_models.values()))
    policy, reference = scored(run, tensors, rows)
    found["packed"] = isinstance(run.trainers.pair_trainer.model.forward, PackedForward)
    found["reference"] = apart(run, oracle(base, run, rows), reference, rows)
    found["moved"] = float(np.abs(policy - reference).max())
    if run.experiment.has_tastes:
        found["features"] = hidden_apart(run, base, rows)
        write_tensors(run.backbone, tensors, folder / "it")
        again = load_client(folder / "it")
        found["export"] = 0.0 if again.extract().equal(tensors) else float("inf")
        return found
    # In the model that all share, personal parts are untouched and change nothing.
    names = None if client else run.method.ownership.names(Owner.SHARED)
    for name, merge in (("export", False), ("merge", True)):
        target = folder / name
        try:
            more = write_tensors(run.backbone, tensors, target, merge=merge, names=names)
        except ModelError as error:
            found[f"{name}_refused"] = str(error)
            continue
        lines = Export(client, None, False, None, merge, more, run.backbone.config).code(str(target))
        found[name] = apart(run, oracle(loaded_by(lines), run, rows), policy, rows)
    return found


def hidden_apart(run: LoadedRun, base: Any, rows: np.ndarray) -> float:
    """The largest difference between the hidden states of responses and those of the plain model."""
    trainer = run.trainers.pair_trainer
    encoder = ResponseEncoder(run.backbone.tokenizer, Template(run.backbone.tokenizer), 480)
    features = ResponseFeatures(trainer.model, encoder, None, "zoo")
    features.fill(rows)
    worst = 0.0
    for got, row in zip(features.get(rows), rows, strict=True):
        pair = encoder.encode([run.trainers.dataset.tokens.record(int(row))])[0]
        for hidden, response in zip(got, (pair.chosen, pair.rejected), strict=True):
            ids = torch.from_numpy(np.concatenate([pair.prompt, response]).astype(np.int64))[None]
            with torch.inference_mode():
                mask = torch.ones_like(ids)
                trunk = base.model if base.base_model is base else base.base_model
                outputs = trunk(input_ids=ids, attention_mask=mask, use_cache=False)
                want = outputs.last_hidden_state[0, -1]
            worst = max(worst, float((hidden - want).abs().max()))
    return worst


def family(kind: str, methods: list[str]) -> dict[str, Any]:
    """What every method gives on a family."""
    result: dict[str, Any] = {"family": kind, "methods": {}}
    if kind in zoo.LEFT_OUT:
        return {**result, "unbuilt": zoo.LEFT_OUT[kind]}
    start = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place(folder)
        zoo.make(kind).save_pretrained(folder / "model")
        for path in (folder / "tokenizer").iterdir():
            shutil.copy(path, folder / "model")
        for method in methods:
            try:
                result["methods"][method] = one(folder, method)
            except Exception as error:  # whatever a pair of family and method gives is a finding
                result["methods"][method] = {"crashed": f"{type(error).__name__}: {str(error)[:300]}"}
            for left in ("run", "export", "merge", "it"):
                shutil.rmtree(folder / left, ignore_errors=True)
    return {**result, "seconds": round(time.process_time() - start, 1)}


def verdict(found: dict[str, Any]) -> str:
    """``"ok"``, or what is wrong in a word or two."""
    for name in ("crashed", "refused"):
        if name in found:
            return f"{name}: {found[name]}"
    wrong = [
        f"{name} {found[name]:.1e}"
        for name in ("reference", "features", "export", "merge")
        if found.get(name, 0.0) > TOLERANCE
    ]
    if found["moved"] < 20 * TOLERANCE:
        wrong.append(f"moved {found['moved']:.1e}")
    return ", ".join(wrong) or "ok"


def add(results: dict[str, dict[str, Any]], result: dict[str, Any]) -> None:
    """Add what some methods gave on a family to what others did."""
    methods = results.get(result["family"], {"methods": {}})["methods"] | result["methods"]
    results[result["family"]] = {**result, "methods": methods}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--families", nargs="+", default=list(zoo.KINDS), metavar="TYPE")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(GROUPS),
        choices=[name for names in GROUPS.values() for name in names],
        metavar="NAME",
        help="left out: one of each group that puts the same parts on a model",
    )
    parser.add_argument("--results", type=Path, help="a file of JSON lines, to which results are added")
    parser.add_argument("--page", type=Path, help="the page whose tables are written")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("prefed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    if options.results and options.results.exists():
        for line in options.results.read_text("utf-8").splitlines():
            add(results, json.loads(line))
    for kind in options.families:
        known = results.get(kind, {"methods": {}})
        methods = [method for method in options.methods if method not in known["methods"]]
        if not methods or "unbuilt" in known:
            continue
        with contextlib.redirect_stderr(io.StringIO()):
            result = family(kind, methods)
        add(results, result)
        if options.results:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        bad = {method: said for method, f in result["methods"].items() if (said := verdict(f)) != "ok"}
        print(
            f"{kind:24} {result.get('seconds', 0):6.1f} s", result.get("unbuilt") or bad or "ok", flush=True
        )
    if options.page:
        write_page(options.page, results.values(), verdict)


if __name__ == "__main__":
    main()
