r"""Faults of one line, each of which a test must notice.

    python benchmarks/mutants.py                 # all; some 10 s each
    python benchmarks/mutants.py cache stopping  # those whose file or change contains a word
    python benchmarks/mutants.py --check         # whether each change can still be made, without a test

Each is made in a copy of the tree, where its tests run; one that they pass survives. The exit code is 1 if
any does. Add a line with every law, twin or guard that a change of tests might lose.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """In ``src/prefed/FILE``, ``old``, which occurs once, becomes ``new``; ``tests`` are to fail."""

    file: str
    old: str
    new: str
    tests: str


MUTANTS = tuple(
    Mutant(*line)
    for line in (
        # train
        (
            "train/pair_trainer.py",
            "self.validation_rows if validate else self.rows",
            "self.rows",
            "unit/test_trainer_factory.py",
        ),
        (
            "train/pair_trainer.py",
            "(model_digest(backbone, idle=False), dataset.tokens.fingerprint, clients)",
            "(dataset.tokens.fingerprint, clients)",
            "unit/test_trainer_factory.py",
        ),
        (
            "train/pair_trainer.py",
            "idle=False), dataset.tokens.fingerprint, clients)",
            "idle=False), clients)",
            "unit/test_trainer_factory.py",
        ),
        (
            "train/pair_trainer.py",
            "dataset.tokens.fingerprint, clients)",
            "dataset.tokens.fingerprint)",
            "engines/test_experiment.py",
        ),
        (
            "train/pair_trainer.py",
            "if name not in self._unseen]",
            "]",
            "unit/test_trainer_factory.py",
        ),
        (
            "train/pair_trainer.py",
            'Key(self.round.key.seed).at("contexts")',
            'self.round.key.at("contexts")',
            "unit/test_trainer_factory.py",
        ),
        (
            "train/forward_passes.py",
            'f"{name}-training"',
            "name",
            "unit/test_trainer_factory.py",
        ),
        (
            "train/pair_cache.py",
            "xxhash.xxh32_intdigest(words.tobytes(), row) or 1",
            "xxhash.xxh32_intdigest(words.tobytes(), 0) or 1",
            "unit/test_trainer_factory.py",
        ),
        (
            "train/reward_model.py",
            "logits[:, 1] - logits[:, 0]",
            "logits[:, 0] - logits[:, 1]",
            "unit/test_reward_model.py",
        ),
        (
            "train/loss_trainer.py",
            "share * values.sum() / len(rows)",
            "share * values.mean()",
            "golden/test_pair_trainer_twins.py",
        ),
        (
            "train/loss_trainer.py",
            "metrics[name] += share * value",
            "metrics[name] += value",
            "golden/test_pair_trainer_twins.py golden/test_kto.py",
        ),
        (
            "train/optimizer_steps.py",
            "slope = gate * (1 - gate)",
            "slope = gate",
            "golden/test_optim.py",
        ),
        (
            "train/optimizer_steps.py",
            "return Moments(slots, before + steps)",
            "return Moments(slots, steps)",
            "golden/test_optimizer_state.py",
        ),
        (
            "train/optimizer_steps.py",
            'key.at("epoch", epoch).numpy()',
            'key.at("epoch", 0).numpy()',
            "unit/test_trainer_factory.py",
        ),
        (
            "train/feedback/pairs.py",
            "finite & (per_token[:, 0] > per_token[:, 1])",
            "finite & (per_token[:, 0] >= per_token[:, 1])",
            "unit/test_metrics.py",
        ),
        (
            "train/ppo.py",
            "scores = self._scores(rows)[torch.from_numpy(taken)]",
            "scores = self._scores(rows[taken])",
            "unit/test_ppo.py",
        ),
        # merge
        (
            "merge/rules.py",
            "low, high = ranked[(n - 1) // 2], ranked[n // 2]",
            "low, high = ranked[n // 2], ranked[n // 2]",
            "laws/test_merge_laws.py unit/test_merge.py",
        ),
        (
            "merge/rules.py",
            "[:, : n - liars - 2]",
            "[:, : n - liars - 1]",
            "unit/test_merge.py",
        ),
        (
            "merge/optimizers.py",
            "torch.sign(second - square)",
            "torch.sign(square - second)",
            "unit/test_aggregator.py unit/test_merge.py",
        ),
        (
            "merge/lora.py",
            'axis = 0 if entry.factor == "A" else 1\n            more',
            "axis = 0\n            more",
            "golden/test_ranks.py unit/test_merge_lora.py",
        ),
        (
            "merge/lora.py",
            "factors[module.a] = (2 * draw - 1) * width**-0.5",
            "factors[module.a] = draw * width**-0.5",
            "unit/test_merge_lora.py",
        ),
        (
            "merge/rules.py",
            "max(upload.scalars[LOSS], 0.0)",
            "upload.scalars[LOSS]",
            "golden/test_fair_weights.py",
        ),
        (
            "merge/aggregator.py",
            "most = max(self.config.ranks[upload.client] for upload in replies)",
            "most = min(self.config.ranks[upload.client] for upload in replies)",
            "golden/test_ranks.py",
        ),
        (
            "merge/aggregator.py",
            "sum(weights) / sum(rest)",
            "1.0",
            "unit/test_merge.py unit/test_aggregator.py laws/test_merge_laws.py",
        ),
        (
            "merge/posteriors.py",
            "means.var(0, correction=0)",
            "means.var(0)",
            "unit/test_prototypes.py unit/test_taste_selector.py",
        ),
        (
            "merge/clustering.py",
            "placed[client] = min(range(count), key=sizes.__getitem__)",
            "placed[client] = max(range(count), key=sizes.__getitem__)",
            "laws/test_cluster_laws.py unit/test_selector_methods.py",
        ),
        (
            "merge/config.py",
            "(1 + late) ** -self.exponent",
            "(1 + late) ** self.exponent",
            "unit/test_aggregator.py",
        ),
        # engines
        (
            "engines/stopping.py",
            "sign * (value - old.value) > stop.delta",
            "sign * (value - old.value) >= stop.delta",
            "engines/test_stopping.py",
        ),
        (
            "engines/stopping.py",
            "since >= stop.patience",
            "since > stop.patience",
            "engines/test_stopping.py",
        ),
        (
            "engines/cohorts.py",
            "if coin * clients < size]",
            "if coin * clients > size]",
            "engines/test_noise.py",
        ),
        (
            "engines/offences.py",
            "job.members if client not in aside | drawn]",
            "job.members if client not in aside]",
            "engines/test_offences.py",
        ),
        (
            "engines/diagnostics.py",
            "p * (1 - p) * variance / 2",
            "p * p * variance / 2",
            "engines/test_diagnostics.py",
        ),
        (
            "engines/tasks.py",
            "shared = pair_figures(job, score(job.shared(published)))",
            "shared = pair_figures(job, score(model))",
            "engines/test_personal_runs.py",
        ),
        (
            "engines/aggregation.py",
            "upload.client != client]",
            "upload is not uploads[0]]",
            "unit/test_hostile_runs.py engines/test_hostile.py",
        ),
        # data
        (
            "data/partition.py",
            "mask & (scope >= 0)\n\n\ndef leak_mask",
            "mask\n\n\ndef leak_mask",
            "unit/test_data_splits.py unit/test_data_dataset.py laws/test_partition_laws.py",
        ),
        (
            "data/encoding.py",
            'return response if response[:1].isspace() else " " + response',
            "return response",
            "unit/test_data_templates.py unit/test_data_tokens.py",
        ),
        (
            "data/partition.py",
            "np.floor(ratio * clients + 0.5)",
            "np.floor(ratio * clients)",
            "unit/test_data_partition.py",
        ),
        (
            "data/partition.py",
            "np.argsort(-margins",
            "np.argsort(margins",
            "unit/test_data_partition.py",
        ),
        (
            "data/partition.py",
            "values.sum(axis=1, keepdims=True)",
            "values.sum(axis=0, keepdims=True)",
            "unit/test_data_partition.py laws/test_partition_laws.py",
        ),
        (
            "data/partition.py",
            "train = train[np.sort(drawn)]",
            "train = train[: len(drawn)]",
            "unit/test_data_dataset.py",
        ),
        # privacy
        (
            "privacy/clip_and_noise.py",
            "own = (privacy.noise_multiplier or 0.0) * math.sqrt(pairs)",
            "own = privacy.noise_multiplier or 0.0",
            "laws/test_noise_laws.py",
        ),
        (
            "runs/refresh.py",
            'named = Key(self.run.experiment.seed).at("align").at("votes", request)',
            'named = Key(self.run.experiment.seed).at("align").at("votes")',
            "engines/test_align_votes.py",
        ),
        (
            "runs/votes.py",
            'votes = sum("number" in row for row in _rows(path))',
            'votes = len({row["request"] for row in _rows(path)})',
            "engines/test_federation_votes.py",
        ),
        (
            "networks/federation/site.py",
            'f"{what}-{request.attempt}", release)',
            'f"{what}-{request.attempt}-{release}", release)',
            "engines/test_federation_votes.py",
        ),
        (
            "networks/federation/site.py",
            "            self._releases.check(own, privacy, self.config.limits)\n        what",
            "            pass\n        what",
            "engines/test_federation_votes.py",
        ),
        (
            "privacy/clip_and_noise.py",
            "for step in steps.values()))",
            "for step in list(steps.values())[:1]))",
            "laws/test_noise_laws.py",
        ),
        (
            "privacy/clip_and_noise.py",
            "privacy.noise / cohort, key)",
            "privacy.noise, key)",
            "laws/test_noise_laws.py",
        ),
        (
            "privacy/clip_and_noise.py",
            "*[1 / cohort] * len(uploads)]",
            "*[1 / len(uploads)] * len(uploads)]",
            "laws/test_noise_laws.py",
        ),
        (
            "privacy/secure/sums.py",
            "masked + mask if self.member.site < other.site else masked - mask",
            "masked + mask",
            "unit/test_secure.py",
        ),
        # methods
        (
            "methods/fedbiscuit.py",
            'download, "validation"))',
            'download, "train"))',
            "unit/test_selector_methods.py",
        ),
        (
            "methods/base/selector.py",
            'State(), published, "train")',
            'State(), published, "validation")',
            "unit/test_selector_methods.py",
        ),
        (
            "methods/base/lr_schedule.py",
            "(now.number - 1) / rounds",
            "now.number / rounds",
            "unit/test_methods.py",
        ),
        # losses
        (
            "train/losses/preference.py",
            "1 / (2 * beta)) ** 2",
            "1 / beta) ** 2",
            "unit/test_losses.py",
        ),
        (
            "train/feedback/pairs.py",
            'self.rejected_ratio / self.need("rejected_length")',
            "self.rejected_ratio / self.chosen_length",
            "unit/test_losses.py",
        ),
        (
            "train/losses/ppo.py",
            "-torch.minimum(ratio",
            "-torch.maximum(ratio",
            "unit/test_ppo_losses.py",
        ),
        (
            "train/losses/ppo.py",
            "for step in reversed(range(",
            "for step in (range(",
            "unit/test_ppo_losses.py",
        ),
        # core, store, align
        (
            "core/random_keys.py",
            'f"{name!r}={value!r}"',
            "repr(name)",
            "unit/test_random_keys.py",
        ),
        (
            "store/commit.py",
            "files.digest(data) != digest",
            "not data",
            "unit/test_durability.py",
        ),
        (
            "align/judge/questions.py",
            "1.0 - backward.preference",
            "backward.preference",
            "unit/test_judges.py",
        ),
    )
)


def copy(folder: Path) -> Path:
    """Copy the tree without what was built, next to the same shared folder."""
    built = shutil.ignore_patterns(".*", "runs", "site", "build", "dist")
    cached = shutil.ignore_patterns("__pycache__")

    def ignored(place: str, names: list[str]) -> set[str]:
        return (built if Path(place) == ROOT else cached)(place, names)

    tree = Path(shutil.copytree(ROOT, folder / ROOT.name, ignore=ignored))
    other = ROOT.parent / "shared"
    if other.exists():
        (folder / "shared").symlink_to(other)
    return tree


def killer(tree: Path, mutant: Mutant) -> str:
    """The first test that fails with a mutant's change; empty if all pass."""
    path, log = tree / "src/prefed" / mutant.file, tree / "log"
    text = path.read_text("utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    tests = [f"tests/{name}" for name in mutant.tests.split()]
    child = os.fork()
    if not child:
        run(tree, log, tests)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    path.write_text(text, "utf-8")
    if code not in (0, 1):
        raise SystemExit(f"{mutant.file}: {mutant.new!r}: pytest ended with {code}: the tests do not run")
    found = re.search(r"^(?:SUB)?FAILED.*? (tests/\S+)", log.read_text(), re.MULTILINE)
    return found[1] if found else ""


def run(tree: Path, log: Path, tests: list[str]) -> NoReturn:
    """Run tests of the tree in this process, which ends: imports of large libraries are its parent's."""
    code = 2
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree / "src")
        sys.path.insert(0, str(tree / "src"))
        # A fault may loop for ever.
        code = pytest.main(["-n0", "-x", "--timeout=1200", "-p", "no:cacheprovider", *tests])
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(*words: str) -> None:
    """Make the changes and print what survives."""
    for mutant in MUTANTS:
        found = (ROOT / "src/prefed" / mutant.file).read_text("utf-8").count(mutant.old)
        if found != 1:
            raise SystemExit(f"{mutant.file} has {mutant.old!r} {found} times, not once: update the list")
    if words == ("--check",):
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    for library in ("torch", "transformers", "peft", "datasets"):
        importlib.import_module(library)
    chosen = [m for m in MUTANTS if not words or any(w in f"{m.file} {m.old}" for w in words)]
    with tempfile.TemporaryDirectory() as folder:
        tree = copy(Path(folder))
        alive = 0
        for mutant in chosen:
            test = killer(tree, mutant)
            alive += not test
            line = " ".join(mutant.new.split()) or f"without {mutant.old}"
            fate = f"killed by {test.removeprefix('tests/')}" if test else "SURVIVES"
            print(f"{mutant.file}: {line}: {fate}", flush=True)
    print(f"{alive} of {len(chosen)} survive")
    raise SystemExit(bool(alive))


if __name__ == "__main__":
    main(*sys.argv[1:])
