"""The model card of an exported model: a README for the Hugging Face hub.

It contains no client's name, no path and no text of a pair.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from prefed.config.align import CLIENTS, judge_kind
from prefed.core.strict_settings import flatten
from prefed.core.text import markdown_text, pluralize, printable_lines, size
from prefed.runs.align import stored_settings
from prefed.runs.export import Export
from prefed.runs.finished_run import RunError, RunRecord, alignment_of, spent_with_votes
from prefed.runs.metrics import Figure
from prefed.runs.start_or_resume import is_place
from prefed.train.metrics import TABLE, mean_interval
from prefed.ui.pages.origin import described_method
from prefed.ui.pages.tables import setting
from prefed.ui.templates import make_environment

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
"""Keys of ``[align]`` on a card. Others may contain a client's name or a path."""
AGREEMENT = "agreement"
MEANING = "share of held-out pairs of completions on which the model agrees with the labels"


CARD = "README.md"
FOLDER = "path/to/this/folder"
"""Placeholder for the folder of a model without a name on the hub."""


_TRUST: Mapping[object, str] = {
    "central": "clients trust the server, which receives their updates without noise and adds noise to the "
    "sum. The guarantee holds towards everyone who receives the model.",
    "distributed": "clients trust their own site, and that no more sites than stated collude with the hub, "
    "which learns only the sum of a round. Each site adds a share of the noise.",
    "local": "clients need not trust the server: each adds noise to its update before sending it.",
}
"""``[privacy] kind`` → who must be trusted."""
_SAMPLING = {
    True: "Cohorts may be known, so sampling does not amplify privacy.",
    False: "This assumes that nobody who sees the model knows the cohorts or the seed.",
}
_SEED = "Whoever knows the seed can remove the noise."
_MAY_REVEAL = "The model may still reveal information about its training data."


def model_card(
    run: RunRecord,
    export: Export,
    *,
    repo: str | None = None,
    base: str | None = None,
    license: str | None = None,
) -> str:
    """Write the card of a model of a finished run.

    Args:
        repo: the repository's name on the hub.
        base: the base model's name on the hub; default: the run's, if it is a hub name.
        license: the hub's name of the licence; default: the base model's, if known.
    """
    from huggingface_hub import ModelCard, ModelCardData

    base = base or hub_name(export.model.name)
    licence, whose = (license, "") if license else (base_license(export.model.name), ", like the base model")
    sets = data_sets(run)
    name = base or Path(export.model.name).name
    content = (_aligned_content if export.aligned else _content)(run, export, sets)
    data = ModelCardData(
        base_model=base,
        datasets=sets or None,
        license=licence,
        library_name="transformers" if export.merged else "peft",
        pipeline_tag="text-generation",
        tags=["prefed", "federated-learning", "preference-optimization", run.method],
        model_name=(repo or run.name).rpartition("/")[2],
        eval_results=content.pop("results"),
    )
    kind, method = described_method(run) or {}, run.method
    source = kind.get("source", "not a method of this version")
    text = (
        make_environment("prefed.ui.pages", autoescape=False, finalize=_escaped)
        .get_template("card.md")
        .render(
            title=repo or f"{method} on {base or 'a local model'}",
            base=base or f"{name}, a local folder",
            method=method,
            method_title=kind.get("title", method),
            source=source,
            made=", ".join(f"{n} {v}" for n, v in run.summary.get("versions", {}).items() if n != "python"),
            code=Markup(
                "\n".join(
                    export.code(repo or FOLDER, base or Path(export.model.name).name, hub=repo is not None)
                )
            ),
            cost=_cost(run),
            privacy=_privacy(run, export),
            licence=f"{licence}{whose}."
            if licence
            else "Not specified. Choose a licence before you share the model.",
            citation=_citation(source),
            **content,
        )
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}"))


def _escaped(value: Any) -> Any:
    """Escape what a run or a base model's card says; only markup of this module stays."""
    return markdown_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def hub_name(name: str) -> str | None:
    """``name`` if it can be a hub name of a model or dataset and is not a local path; otherwise ``None``.

    >>> hub_name("distilbert/distilgpt2"), hub_name("/home/ann/model"), hub_name("pairs.jsonl")
    ('distilbert/distilgpt2', None, None)
    """
    known = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name) and not Path(name).exists()
    return name if known and not re.search(r"\.(jsonl?|csv|tsv|parquet|txt|arrow|gz)$", name) else None


def base_license(name: str) -> str | None:
    """The licence in a base model's card, from its folder or the hub's cache; ``None`` if unknown."""
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
    """Hub names of the datasets that the run trained on."""
    train = run.config["data"].get("train", {})
    paths = [value for name, value in flatten({"train": train}).items() if name.rpartition(".")[2] == "path"]
    return [name for name in map(hub_name, map(str, paths)) if name is not None]


def _content(run: RunRecord, export: Export, sets: list[str]) -> dict[str, Any]:
    """The parts of the card of a model that the clients trained, and its results as metadata."""
    dataset = (sets[0] if len(sets) == 1 else "private", f"{run.split} pairs of the clients")
    metrics = [(figure, *_shares(figure, export)) for figure in _of(run, export)]
    return {
        "what": _what(export),
        "course": f"{_course(run)}. Settings of the method and the adapter:",
        "settings": _settings(run, run.config["model"].get("lora", {}), {}),
        "data": _data(run, sets),
        "figures": [
            (figure.label, f"{mean:.1%}", _interval(run, figure, shares), figure.meaning)
            for figure, shares, mean in metrics
        ],
        "over": f"its {run.split} pairs" if export.client else "mean over clients",
        "note": _note(run, export),
        "answers": _answers(run, export),
        "results": [
            _result(*dataset, figure.name.replace("_", " "), mean)
            for figure, _, mean in metrics
            if figure.name != "baseline_accuracy"
        ],
    }


def _aligned_content(run: RunRecord, export: Export, sets: list[str]) -> dict[str, Any]:
    """The same for a model that the server aligned.

    Raises:
        RunError: the run has no finished alignment, or its files are damaged.
    """
    outcome, table = alignment_of(run.path), stored_settings(run)
    if outcome is None or table is None:
        raise RunError(f"{run.path}/align: not finished; continue with `prefed align {run.path} --resume`")
    labellers = {"judge": "a judge", CLIENTS: "votes of clients"}
    labeller = labellers.get(judge_kind(str(table.get("labels", ""))), "the clients' selectors")
    labels, train = outcome.summary["labels"], outcome.summary["train"]
    prompts = pluralize(outcome.summary["prompts"]["kept"], "prompt", "prompts")
    pairs = pluralize(train["held_out"], "pair", "pairs")
    figures, results = [], []
    kept = train["epochs"][train["kept"] - 1]
    # An older prefed measured no win rate.
    by = "this agreement" if kept.get("win_rate") is None else "the win rate of its answers to them"
    if (share := kept["agreement"]) is not None:
        low, high = mean_interval({AGREEMENT: share}, {AGREEMENT: train["held_out"]})
        figures = [(AGREEMENT, f"{share:.1%}", f"{low:.1%} to {high:.1%}", MEANING)]
        results = [_result("private", "held-out pairs of completions", AGREEMENT, share)]
    return {
        "what": f"The server's model, aligned with labels from {labeller}"
        f"{'' if export.taste is None else ', with one taste'}.",
        "course": f"Selectors: {_course(run)}. Settings of their method, the adapter and the alignment:",
        "settings": _settings(
            run,
            export.model.lora.model_dump(),
            {f"align.{name}": table[name] for name in SETTINGS if name in table},
        ),
        "data": Markup(
            f"{_data(run, sets)} The server's model completed {prompts} that no client holds. "
            f"{labels['labelled']:,} pairs of completions were labelled, and {train['pairs']:,} of them used "
            "for training."
        ),
        "figures": figures,
        "over": "held-out labels",
        "note": f"Measured on {pairs} of completions of held-out prompts, after epoch {train['kept']} of "
        f"{len(train['epochs'])}, which was selected by {by}. No client's pairs are included. "
        "The Wilson interval assumes independent pairs.",
        "answers": [],
        "results": results,
    }


def _result(kind: str, dataset: str, name: str, value: float) -> Any:
    from huggingface_hub import EvalResult

    return EvalResult(
        task_type="text-generation",
        dataset_type=kind,
        dataset_name=dataset,
        metric_type="accuracy",
        metric_name=name,
        metric_value=round(value, 4),
    )


def _what(export: Export) -> str:
    if export.selector is not None:
        return "A selector, which judges which of two responses is better. It does not generate responses."
    if export.client is not None:
        return (
            "The personal model of one client. It was trained on this client's pairs and may reproduce them. "
            "It belongs to the client."
        )
    return "The model shared by all clients, without personal parts."


def _course(run: RunRecord) -> str:
    clients = pluralize(len(run.summary.get("clients", {})), "client", "clients")
    rounds = pluralize(run.summary["rounds"], "round", "rounds")
    return f"{clients}, {rounds}, seed {run.summary['seed']}"


def _settings(run: RunRecord, lora: Mapping[str, Any], more: Mapping[str, Any]) -> list[tuple[str, str]]:
    tables = {**flatten({"method": run.config["method"], "lora": lora}), **more}
    return [(name, setting(value)) for name, value in tables.items() if not is_place(name)]


def _data(run: RunRecord, sets: list[str]) -> str:
    sizes = [counts["train"] for counts in run.summary.get("clients", {}).values() if counts["train"]]
    source = ", ".join(f"[{name}](https://huggingface.co/datasets/{name})" for name in sets)
    source = source or "a dataset that is not public"
    if not sizes:
        return Markup(f"Preference pairs from {source}.")
    each = f"{min(sizes):,} to {max(sizes):,}" if min(sizes) < max(sizes) else f"{min(sizes):,}"
    return Markup(
        f"{sum(sizes):,} preference pairs from {source}, held by "
        f"{pluralize(len(sizes), 'client', 'clients')} with {each} pairs each."
    )


def _privacy(run: RunRecord, export: Export) -> list[str]:
    """What the run guarantees each client, one sentence or two per line."""
    # An adapter is aligned after all votes, which are further releases.
    spent = spent_with_votes(alignment_of(run.path)) if export.aligned else {}
    promise: Mapping[str, Any] | None = {**run.summary, **spent}.get("privacy")
    if promise is None or promise["epsilon"] is None:
        why = "no noise was added during training" if promise is None else "updates have no noise"
        return [f"No guarantee of differential privacy: {why}. {_MAY_REVEAL}"]
    votes = f", and {promise['votes']} of votes on completions" if "votes" in promise else ""
    lines = [
        f"**Guarantee**: differential privacy with epsilon {promise['epsilon']:.3g} at delta "
        f"{promise['delta']:g}, by the Gaussian mechanism with clip {promise['clip']:g} and noise multiplier "
        f"{promise['noise_multiplier']:g}, over {pluralize(promise['releases'], 'release', 'releases')} of "
        "the client that took part most often"
        f"{votes}.",
        f"**Unit**: one client with all its pairs. In neighbouring data sets, "
        f"{markdown_text(promise['adjacency'])}.",
        f"**Sampling**: {markdown_text(promise['bound'])}. {_SAMPLING['cohorts known' in promise['bound']]}",
        f"**Trust**: {_TRUST[promise['kind']]}",
        f"**Not covered**: {'' if promise['kind'] == 'distributed' else 'metrics, '}numbers of clients and "
        f"pairs, and settings that were tuned on the same clients. {_MAY_REVEAL}",
    ]
    if promise["draws"] == "seed":
        lines.insert(4, f"**Noise**: drawn from the run's seed, as in a simulation. {_SEED}")
    if export.client is not None:
        lines.append("**This model is not covered either**: it also depends on its own client's pairs.")
    return [Markup(line) for line in lines]


def _interval(run: RunRecord, figure: Figure, shares: Mapping[str, float]) -> str:
    if not shares or "mean_alone" in figure.values:
        return ""
    low, high = mean_interval(shares, {client: run.pairs(client) or 1 for client in shares})
    return f"{low:.1%} to {high:.1%}"


def _of(run: RunRecord, export: Export) -> list[Figure]:
    figures = run.figures
    if export.selector is not None:
        names = ["baseline_accuracy", f"{export.selector.replace('-', '_')}_accuracy"]
    elif export.client is None and "shared_accuracy" in figures:
        names = ["baseline_accuracy", "shared_accuracy"]  # the others are of the personal models
    else:
        names = [row.name for row in TABLE.values() if row.share and row.of in ("all", "policies")]
    return [
        figures[name]
        for name in names
        if name in figures and (export.client is None or export.client in figures[name].values["per_client"])
    ]


def _answers(run: RunRecord, export: Export) -> list[tuple[str, str, str]]:
    """Each prompt of ``[report]`` with what the base model and the exported one write; empty without."""

    def texts(*model: str | int | None) -> dict[str, str]:
        # A card quotes no held-out prompt, which is a client's.
        rows = (row for row in run.answers if row.holder is None)
        rows = (row for row in rows if (row.model, row.client, row.round) == model)
        return {row.prompt: _quoted(row.text) for row in rows}

    before = texts("untouched", None, 0)
    after = texts("own" if export.client else "shared", export.client, run.summary["rounds"])
    return [(_quoted(prompt), before[prompt], text) for prompt, text in after.items()]


def _quoted(text: str) -> str:
    r"""A text as it may stand between two lines of backquotes.

    >>> print(_quoted("a `<img>`\nand more "))
    a '<img>'
    and more
    """
    lines = printable_lines(text.strip()).replace("`", "'").splitlines()
    return Markup("\n".join(textwrap.fill(line, 100) for line in lines))


def _shares(figure: Figure, export: Export) -> tuple[Mapping[str, float], float]:
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
    when = f"round {last['round']}, the best round on validation pairs," if best else "the last round"
    return (
        f"Measured after {when} on {pairs:,} {run.split} pairs {whose}. The interval covers variation from "
        "resampling pairs of the same clients (Wilson intervals, combined over clients)."
    )


def _cost(run: RunRecord) -> str:
    traffic, parameters = run.summary["bytes"], run.summary.get("parameters", {})
    visits = sum(len(record.get("cohort", ())) for record in run.rounds)
    text = f"Clients uploaded {size(traffic['up'])} and downloaded {size(traffic['down'])} in total"
    if visits:
        each = (size(traffic[way] / visits) for way in ("up", "down"))
        text += f", {' and '.join(each)} per client and round"
    if parameters:
        text += f". {parameters['trainable']:,} parameters are trainable, and an upload has "
        text += f"{parameters['communicated']:,}"
    return f"{text}."


def _citation(source: str) -> str:
    numbers = re.findall(r"arXiv:(\d+\.\d+)", source)
    links = ", ".join(f"[arXiv:{number}](https://arxiv.org/abs/{number})" for number in numbers)
    return Markup(
        f"The method is from {markdown_text(source)}{': ' + links if links else ''}. Please cite this paper "
        "and prefed."
    )
