"""The model card of an exported model: a README that the Hugging Face hub shows.

It names no client and no path. It quotes no text of a pair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from prefed.core.strict_settings import flatten
from prefed.core.text import pluralize, printable, size
from prefed.methods import METHODS
from prefed.runs.align import stored_settings
from prefed.runs.export import Export
from prefed.runs.metrics import Figure
from prefed.runs.record import RunError, RunRecord, alignment_of
from prefed.runs.start_or_resume import is_place
from prefed.train.metrics import mean_interval
from prefed.ui.pages.tables import setting
from prefed.ui.pages.terminal import privacy_line

SETTINGS = (
    *("objective", "beta", "optimizer", "lr", "clip", "batch_size", "epochs", "held_out"),
    *(
        "completions",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "tastes",
        "generations",
        "regenerate",
    ),
)
"""The keys of ``[align]`` that a card shows. Others may name a client or a path."""
AGREEMENT = "agreement"
MEANING = "share of held-out pairs of completions that the model orders as their labels do"


@dataclass(frozen=True)
class AlignedModel:
    """An alignment that is done.

    Attributes:
        summary: what ``align/summary.json`` holds.
        table: the ``[align]`` table that it was done with.
    """

    summary: Mapping[str, Any]
    table: Mapping[str, Any]

    @staticmethod
    def of(run: RunRecord) -> AlignedModel:
        """That of a run.

        Raises:
            RunError: the run has none, or its files are damaged.
        """
        outcome, table = alignment_of(run.path), stored_settings(run)
        if outcome is None or table is None:
            raise RunError(f"{run.path}/align: not finished; continue it: prefed align {run.path} --resume")
        return AlignedModel(outcome.summary, table)

    @property
    def what(self) -> str:
        """Who aligned it."""
        judged = str(self.table.get("labels", "")).startswith("judge:")
        labeller = "the labels of a judge" if judged else "the clients' selectors"
        return f"The server's own model, aligned with {labeller}"

    @property
    def settings(self) -> Iterator[tuple[str, Any]]:
        """The settings that a card shows."""
        return ((f"align.{name}", self.table[name]) for name in SETTINGS if name in self.table)

    @property
    def data(self) -> str:
        """What it was trained on, in a sentence."""
        labels, train = self.summary["labels"], self.summary["train"]
        prompts = pluralize(self.summary["prompts"]["kept"], "prompt", "prompts")
        return (
            f"The server's model answered {prompts} of the server's own, which no client holds. Labels were "
            f"given to {labels['labelled']:,} pairs of answers; {train['pairs']:,} were trained on."
        )

    @property
    def agreement(self) -> float | None:
        """The share of held-out pairs that it orders as their labels; ``None`` without such pairs."""
        train = self.summary["train"]
        share: float | None = train["epochs"][train["kept"] - 1]["agreement"]
        return share

    @property
    def figures(self) -> list[tuple[str, str, str, str]]:
        """The agreement, with its 95% interval."""
        if self.agreement is None:
            return []
        low, high = mean_interval({AGREEMENT: self.agreement}, {AGREEMENT: self.summary["train"]["held_out"]})
        return [(AGREEMENT, f"{self.agreement:.1%}", f"{low:.1%} to {high:.1%}", MEANING)]

    @property
    def note(self) -> str:
        """On what it was measured."""
        train = self.summary["train"]
        pairs = pluralize(train["held_out"], "pair", "pairs")
        return (
            f"Measured on {pairs} of completions of prompts that were not trained on, after epoch "
            f"{train['kept']} of {len(train['epochs'])}, which was kept for it. No pair of a client is among "
            "them. The interval is Wilson's, and takes the pairs as independent."
        )


CARD = "README.md"
FOLDER = "path/to/this/folder"
"""What a card calls its folder until it has a name on the hub."""
TOLD = (
    "baseline_accuracy",
    "preference_accuracy",
    "reward_accuracy",
    "normalized_accuracy",
)
"""The figures of a policy that a card may show."""


def model_card(
    run: RunRecord,
    export: Export,
    *,
    repo: str | None = None,
    base: str | None = None,
    license: str | None = None,
) -> str:
    """The card of one model of a finished run.

    Args:
        repo: the name that it will have on the hub.
        base: the base model's name on the hub; left out: the run's, if it is a hub name.
        license: as the hub names it; left out: that of the base model, where it is known.
    """
    from huggingface_hub import ModelCard, ModelCardData

    base = base or hub_name(export.model.name)
    aligned = AlignedModel.of(run) if export.aligned else None
    licence, whose = (license, "") if license else (base_license(export.model.name), ", as the base model")
    sets = data_sets(run)
    name = base or Path(export.model.name).name
    data = ModelCardData(
        base_model=base,
        datasets=sets or None,
        license=licence,
        library_name="transformers" if export.merged else "peft",
        pipeline_tag="text-generation",
        tags=["prefed", "federated-learning", "preference-optimization", run.method],
        model_name=(repo or run.name).rpartition("/")[2],
        eval_results=_aligned_results(aligned) if aligned else _results(run, export, sets),
    )
    kind, method = METHODS.get(run.method), printable(run.method)
    source = kind.source if kind else "not a method of this version"
    text = _template().render(
        title=repo or f"{method} on {base or 'a model of its own'}",
        what=_what(export, aligned),
        base=base or f"`{printable(name)}`, a folder that is not on the hub",
        method=method,
        method_title=kind.title if kind else method,
        source=source,
        made=printable(
            ", ".join(f"{n} {v}" for n, v in run.summary.get("versions", {}).items() if n != "python")
        ),
        code="\n".join(
            export.code(repo or FOLDER, base or Path(export.model.name).name, hub=repo is not None)
        ),
        course=_course(run, aligned),
        settings=list(_settings(run, export, aligned)),
        data=_data(run, sets) + (f" {aligned.data}" if aligned else ""),
        figures=aligned.figures if aligned else _figures(run, export),
        over="held-out labels"
        if aligned
        else f"its {run.split} pairs"
        if export.client
        else "mean over clients",
        note=aligned.note if aligned else _note(run, export),
        cost=_cost(run),
        noise=privacy_line(run.summary["privacy"]) if "privacy" in run.summary else "",
        licence=f"{printable(licence)}{whose}."
        if licence
        else "None is stated: whoever hands the model on states one.",
        citation=_citation(source),
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}"))


def hub_name(name: str) -> str | None:
    """``name``, if it can be that of a model or a data set on the hub and is no path here.

    >>> hub_name("distilbert/distilgpt2"), hub_name("/home/ann/model"), hub_name("pairs.jsonl")
    ('distilbert/distilgpt2', None, None)
    """
    known = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name) and not Path(name).exists()
    return name if known and not re.search(r"\.(jsonl?|csv|tsv|parquet|txt|arrow|gz)$", name) else None


def base_license(name: str) -> str | None:
    """The licence in a base model's own card, in its folder or the hub's cache; ``None`` if unknown."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    path: Any = Path(name) / CARD
    if not path.is_file():
        path = try_to_load_from_cache(name, CARD) if hub_name(name) else None
    if not isinstance(path, str | Path):
        return None
    try:
        licence = ModelCard.load(path).data.license
    except (OSError, ValueError):
        return None
    return licence if isinstance(licence, str) else None


def data_sets(run: RunRecord) -> list[str]:
    """The hub names of the sets that the run trained on."""
    train = run.config["data"].get("train", {})
    paths = [value for name, value in flatten({"train": train}).items() if name.rpartition(".")[2] == "path"]
    return [name for name in map(hub_name, map(str, paths)) if name is not None]


def _what(export: Export, aligned: AlignedModel | None) -> str:
    if aligned is not None:
        return f"{aligned.what}{'' if export.taste is None else ', at one taste'}."
    if export.selector is not None:
        return "A selector: it says which of two responses is better. It is no model to talk with."
    if export.client is not None:
        return (
            "The own model of one client. It was trained on that client's pairs, may repeat them, and "
            "belongs to that client."
        )
    return "The model that all clients share, without any client's own parts."


def _course(run: RunRecord, aligned: AlignedModel | None) -> str:
    clients = pluralize(len(run.summary.get("clients", {})), "client", "clients")
    rounds = pluralize(run.summary["rounds"], "round", "rounds")
    course = f"{clients}, {rounds}, seed {run.summary['seed']}"
    if aligned is None:
        return f"{course}. Settings of the method and of the adapter:"
    return (
        f"{course}: so the selectors were trained. Settings of their method, of the adapter and of the "
        "alignment:"
    )


def _settings(run: RunRecord, export: Export, aligned: AlignedModel | None) -> Iterator[tuple[str, str]]:
    lora = run.config["model"].get("lora", {})
    tables = {"method": run.config["method"], "lora": export.model.lora.model_dump() if aligned else lora}
    for name, value in (*flatten(tables).items(), *(aligned.settings if aligned else ())):
        if not is_place(name):
            yield name, printable(setting(value)).replace("|", "\\|")


def _data(run: RunRecord, sets: list[str]) -> str:
    sizes = [counts["train"] for counts in run.summary.get("clients", {}).values() if counts["train"]]
    source = ", ".join(f"[{name}](https://huggingface.co/datasets/{name})" for name in sets)
    source = source or "a set that is not public"
    if not sizes:
        return f"Preference pairs from {source}."
    each = f"{min(sizes):,} to {max(sizes):,}" if min(sizes) < max(sizes) else f"{min(sizes):,}"
    return (
        f"{sum(sizes):,} preference pairs from {source}, held by "
        f"{pluralize(len(sizes), 'client', 'clients')} of {each} pairs each."
    )


def _figures(run: RunRecord, export: Export) -> list[tuple[str, str, str, str]]:
    rows = []
    for figure in _of(run, export):
        shares, mean = _shares(figure, export)
        interval = ""
        if shares and "mean_alone" not in figure.values:
            low, high = mean_interval(shares, {client: run.pairs(client) or 1 for client in shares})
            interval = f"{low:.1%} to {high:.1%}"
        rows.append((figure.label, f"{mean:.1%}", interval, f"{figure.meaning}"))
    return rows


def _of(run: RunRecord, export: Export) -> list[Figure]:
    """The figures that are of the exported model."""
    figures = run.figures
    if export.selector is not None:
        names = ["baseline_accuracy", f"{export.selector.replace('-', '_')}_accuracy"]
    elif export.client is None and "shared_accuracy" in figures:
        names = ["baseline_accuracy", "shared_accuracy"]  # the others are of the clients' own models
    else:
        names = list(TOLD)
    return [
        figures[name]
        for name in names
        if name in figures and (export.client is None or export.client in figures[name].values["per_client"])
    ]


def _shares(figure: Figure, export: Export) -> tuple[Mapping[str, float], float]:
    """The accuracies that a figure is the mean of, and that mean."""
    values = figure.values
    if export.client is None:
        return values["per_client"], values["mean"]
    own = values["per_client"][export.client]
    return {export.client: own}, own


def _note(run: RunRecord, export: Export) -> str:
    clients = [export.client] if export.client else list(run.clients)
    pairs = sum(run.pairs(client) or 0 for client in clients)
    whose = "of the client" if export.client else f"of {pluralize(len(clients), 'client', 'clients')}"
    last = run.summary.get("stop", {}).get("best", {})
    best = last.get("round") == run.summary["rounds"]
    when = f"round {last['round']}, the best by validation pairs," if best else "the last round"
    return (
        f"Measured after {when} on {pairs:,} {run.split} pairs {whose}. The interval says how far "
        "the figure would vary with other pairs of the same clients (Wilson's, combined over clients)."
    )


def _results(run: RunRecord, export: Export, sets: list[str]) -> list[Any]:
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=sets[0] if len(sets) == 1 else "private",
            dataset_name=f"{run.split} pairs of the clients",
            metric_type="accuracy",
            metric_name=figure.name.replace("_", " "),
            metric_value=round(_shares(figure, export)[1], 4),
        )
        for figure in _of(run, export)
        if figure.name != "baseline_accuracy"
    ]


def _aligned_results(aligned: AlignedModel) -> list[Any]:
    from huggingface_hub import EvalResult

    if aligned.agreement is None:
        return []
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="private",
            dataset_name="held-out pairs of completions",
            metric_type="accuracy",
            metric_name=AGREEMENT,
            metric_value=round(aligned.agreement, 4),
        )
    ]


def _cost(run: RunRecord) -> str:
    traffic, parameters = run.summary["bytes"], run.summary.get("parameters", {})
    visits = sum(len(record.get("cohort", ())) for record in run.rounds)
    text = f"Clients sent {size(traffic['up'])} and were sent {size(traffic['down'])} over the whole run"
    if visits:
        text += (
            f", {size(traffic['up'] / visits)} and {size(traffic['down'] / visits)} in each visit of a client"
        )
    if parameters:
        text += f". {parameters['trainable']:,} numbers are trained, and {parameters['communicated']:,} sent"
    return f"{text}."


def _citation(source: str) -> str:
    numbers = re.findall(r"arXiv:(\d+\.\d+)", source)
    links = ", ".join(f"[arXiv:{number}](https://arxiv.org/abs/{number})" for number in numbers)
    return f"The method is that of {source}{': ' + links if links else ''}. Cite that paper, and prefed."


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("prefed.ui.pages"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template("card.md")
