"""The tables of ``docs/models.md``: which families work, with which methods, and why others do not."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import zoo

from prefed.methods import METHODS

FULL = "full"
"""Stands for FedDPO that trains every weight."""

_LORA = ("fedsft", "fedprox", "scaffold", "centralized", "local", "decdpo", "perfedavg", "fedamp")
GROUPS: Mapping[str, tuple[str, ...]] = {
    "feddpo": ("feddpo", *_LORA, "ditto", "pfedme", "fedala"),
    "fedsdg": ("fedsdg",),
    "feddpa": ("feddpa",),
    "fedper": ("fedper", "fedrep"),
    "fedpdpo": ("fedpdpo",),
    "fedbn": ("fedbn",),
    "fedbis": ("fedbis", "fedbiscuit"),
    "fedvpl": ("fedvpl", "fedvpa"),
    FULL: (FULL,),
}
"""The method that is run → all those that put the same parts on a model."""

LEFT_OUT = ("icl", "lore", "pal")
"""They add no adapter or weights to the model."""

assert {name for names in GROUPS.values() for name in names} == {*METHODS, FULL} - {*LEFT_OUT}

Verdict = Callable[[dict[str, Any]], str]
"""What a method gives on a family: ``"ok"``, or what is wrong."""


def write_page(path: Path, results: Iterable[Mapping[str, Any]], verdict: Verdict) -> None:
    """Put the tables of ``results``, as the program writes them, into the page's marked places."""
    works: dict[tuple[bool, str, str], list[tuple[str, float]]] = {}
    refused, unbuilt = [], []
    for result in sorted(results, key=lambda each: str(each["family"])):
        family, verdicts = (
            f"`{result['family']}`",
            {method: verdict(found) for method, found in result["methods"].items()},
        )
        if "unbuilt" in result:
            unbuilt.append((family, result["unbuilt"]))
        elif "ok" in verdicts.values():
            kind, worst = _kind(result, verdicts)
            works.setdefault(kind, []).append((_name(result), worst))
        else:
            refused.append((family, _reason(verdicts)))
    head = ("path", "methods", "merged", "difference", "families")
    rows = [
        (
            "plain" if plain else "packed",
            methods,
            merged,
            f"{max(worst for _, worst in found):.0e}",
            ", ".join(name for name, _ in found),
        )
        for (plain, methods, merged), found in sorted(works.items())
    ]
    parts = {
        "about": _about(sum(map(len, works.values())), len(refused), len(unbuilt)),
        "works": _table(head, rows),
        "refused": _table(("family", "reason"), refused),
        "unbuilt": _table(("family", "reason"), unbuilt),
    }
    text = path.read_text("utf-8")
    for name, part in parts.items():
        before, begin, rest = text.partition(f"<!-- begin: {name} -->\n")
        text = before + begin + part + "".join(rest.partition(f"<!-- end: {name} -->")[1:])
    path.write_text(text, "utf-8")


def _about(works: int, refused: int, unbuilt: int) -> str:
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    return (
        f"Tested on {datetime.datetime.now(datetime.UTC).date()} at commit `{commit}` with "
        f"transformers {transformers.__version__}, PEFT {peft.__version__} and PyTorch "
        f"{torch.__version__.partition('+')[0]}: {works} families work, {refused} are refused, and {unbuilt} "
        "were not built.\n"
    )


def _packed(result: Mapping[str, Any]) -> bool:
    return any(found.get("packed") for found in result["methods"].values())


def _kind(result: Mapping[str, Any], verdicts: Mapping[str, str]) -> tuple[tuple[bool, str, str], float]:
    """What families of one row have in common, and the largest difference of this one."""
    unknown = [name for method, names in GROUPS.items() if method not in verdicts for name in names]
    failed = [method for method, said in verdicts.items() if said != "ok"]
    wrong = [name for method in failed for name in GROUPS.get(method, [method])]
    fine = [result["methods"][method] for method, said in verdicts.items() if said == "ok"]
    worst = max(found.get(name, 0.0) for found in fine for name in ("export", "merge", "reference"))
    merged = "yes" if "merge" in result["methods"]["feddpo"] else "no"
    return (not _packed(result), _methods(wrong, unknown), merged), worst


def _name(result: Mapping[str, Any]) -> str:
    """A family that is tested always is bold."""
    name = f"`{result['family']}`"
    return f"**{name}**" if result["family"] in zoo.QUICK else name


def _methods(wrong: Sequence[str], unknown: Sequence[str]) -> str:
    said = f"all but {', '.join(wrong)}" if wrong else "all"
    if unknown:
        said += f"; not run: {', '.join(unknown)}"
    return said.replace(FULL, '`train = "full"`')


def _reason(verdicts: Mapping[str, str]) -> str:
    """The part of the first message that says why."""
    said = next(iter(verdicts.values())).removeprefix("refused: [model] name = '…'").strip(": ")
    if said.startswith("is not causal"):
        return "not causal"
    if "Unrecognized configuration class" in said:
        return "`AutoModelForCausalLM` does not load what it builds and saves"
    return said.partition("does not accept token ids only: ")[2].partition("; use")[0] or said


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
