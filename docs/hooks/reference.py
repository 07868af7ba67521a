"""Reference tables made from the package while MkDocs builds the site, so that they are never out of date.

In a page, on a line of its own::

    <!-- settings: prefed.config:CohortConfig -->

becomes a table of every key of a settings record; with ``beyond MODULE:RECORD`` before the end only of the
keys that differ from another record's. ``<!-- metrics: pairs -->`` becomes the table of metrics of ``pairs``,
``answers`` or ``rounds``, ``<!-- methods -->``, ``<!-- objectives -->`` and ``<!-- formats -->``
become the registries, ``<!-- command: run -->`` the arguments and options of a command, and
``<!-- api: prefed.runs.run run RunResult -->`` the documentation of names of a module, or of a class and some
of its members. The text of a table comes from docstrings: change it there.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel

from prefed.config.new_file import describe

_MARK = re.compile(
    r"^```.*?^```"
    r"|^<!-- (settings|metrics|methods|objectives|formats|command|api)(?:: (.+?))? -->$",
    re.MULTILINE | re.DOTALL,
)
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?(?:[\w.]*\.)?(\w+)`")
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def fill(markdown: str) -> str:
    """A page with every mark outside a code block replaced by its table.

    >>> fill("<!-- settings: prefed.config:CohortConfig -->").splitlines()[2]
    '| `size` | integer ≥ 1 | – | clients a round; left out with fraction: all of them |'
    >>> fill("<!-- api: prefed.runs.run run -->").splitlines()
    ['::: prefed.runs.run', '    options:', '      members: [run]']
    """
    return _MARK.sub(lambda match: _content(match) if match[1] else match[0], markdown)


def _content(match: re.Match[str]) -> str:
    """What a mark becomes, by its kind and its words."""
    kind, words = match[1], (match[2] or "").split()
    match kind:
        case "settings":
            return settings(_record(words[0]), _record(words[2]) if len(words) > 1 else None)
        case "api":
            return directive(*words)
        case "command" | "metrics":
            return globals()[kind](words[0])  # type: ignore[no-any-return]
        case _:
            return globals()[kind]()  # type: ignore[no-any-return]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this with each page's text."""
    return fill(markdown)


def directive(name: str, *names: str) -> str:
    """What makes mkdocstrings show a module or a class, or some of its members."""
    return f"::: {name}" + (f"\n    options:\n      members: [{', '.join(names)}]" if names else "")


def settings(record: type[BaseModel], beyond: type[BaseModel] | None = None) -> str:
    """One row per key of ``record``: key, allowed values, default, meaning."""
    schema = record.model_json_schema()
    usual = beyond.model_json_schema()["properties"] if beyond else {}
    rows = [
        (f"`{name}`", _values(field, schema), _default(record, name), _meaning(record, name))
        for name, field in schema["properties"].items()
        if field != usual.get(name)
    ]
    return _table(("key", "value", "default", "meaning"), rows)


def metrics(of: str) -> str:
    """One row per metric of ``"pairs"``, ``"answers"`` or ``"rounds"``."""
    from prefed.train.metrics import TABLE, words_of

    rows = []
    for name, row in TABLE.items():
        if of == ("pairs" if row.of_pairs else row.of):
            _, meaning = words_of(name, {"shared_accuracy": {}} if row.of == "personal models" else {})
            rows.append((f"`{name}`", row.label, *([row.of] if row.of_pairs else []), meaning))
    return _table(("key", "metric", *(["of"] if of == "pairs" else []), "meaning"), rows)


def methods() -> str:
    """One row per method, with a link to the page of a method of prefed."""
    from prefed.methods import METHODS

    rows = [
        (f"[`{name}`]({name}.md)" if name in METHODS.builtin else f"`{name}`", kind.title, kind.source)
        for name, kind in METHODS.items()
    ]
    return _table(("name", "what it is", "source"), rows)


def objectives() -> str:
    """One row per objective."""
    from prefed.train.losses import OBJECTIVES

    rows = []
    for loss in OBJECTIVES.values():
        settings = ", ".join(f"`{name}` {value:g}" for name, value in loss.defaults.items())
        needs = {
            "rejected": loss.needs_rejected,
            "reference": loss.needs_reference,
            "rewards": loss.needs_reward,
            "margin": loss.needs_margin,
        }
        read = ", ".join(["chosen", *(name for name, reads in needs.items() if reads)])
        rows.append((f"`{loss.name}`", loss.source, settings or "–", read))
    return _table(("name", "source", "settings and defaults", "reads"), rows)


def formats() -> str:
    """One row per data format."""
    from prefed.data import FORMATS

    rows = []
    for form in FORMATS.values():
        columns = ", ".join(f"`{column}`" for column in sorted(form.detected_by.split()))
        rows.append((f"`{form.name}`", f"`{form.hub}`" if form.hub else "–", columns or "–"))
    return _table(("format", "hub set", "recognised by its columns"), rows)


EVERYWHERE = ("quiet", "verbose")
"""Options that all commands have. The page describes them once."""


def command(name: str) -> str:
    """The usage of a command, and its arguments and options."""
    from prefed.ui.cli.app import complete_command

    function = complete_command(name)
    words, rows = [f"prefed {name}"], []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.name in EVERYWHERE or parameter.annotation is typer.Context:
            continue
        kind, info = get_args(parameter.annotation)
        value = _value(kind, info, parameter.name)
        if isinstance(info, typer.models.ArgumentInfo):
            optional = parameter.default is not parameter.empty and not value.startswith("[")
            words.append(f"[{value}]" if optional else value)
            term = value
        else:
            # In an annotation, typer takes the first name of an option for its default.
            names = [n for n in (info.default, *(info.param_decls or ())) if isinstance(n, str)]
            term = f"{next(iter(names), '--' + parameter.name.replace('_', '-'))} {value}".strip()
            if parameter.default is parameter.empty:
                words.append(term)
        plain = any(parameter.default is nothing for nothing in (None, False, parameter.empty))
        meaning = info.help + ("" if plain else f" Default: {parameter.default}.")
        rows.append((f"`{term}`", meaning))
    usage = " ".join([*words, *(["[options]"] if rows else [])])
    return f"```text\n{usage}\n```" + (f"\n\n{_table(('argument', 'meaning'), rows)}" if rows else "")


def _value(kind: Any, info: Any, name: str) -> str:
    """The placeholder of an argument's or option's value; empty for a switch."""
    if kind is bool:
        return ""
    literals = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    choices = "/".join(choice for literal in literals for choice in get_args(literal))
    return info.metavar or choices or name.upper().replace("_", "-")


def _record(path: str) -> type[BaseModel]:
    module, _, name = path.partition(":")
    record: type[BaseModel] = getattr(importlib.import_module(module), name)
    return record


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _meaning(record: type[BaseModel], name: str) -> str:
    if name == "by":
        return "names the partition"
    text = re.sub(r":(data|class|func):~?", "", describe(record, name))
    text = re.sub(r"\. None", "; None", text)
    return re.sub(r"\bNone(:| takes)", "left out:", text)


def _default(record: type[BaseModel], name: str) -> str:
    field = record.model_fields[name]
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ({}, ()):
        return "–"
    if isinstance(value, BaseModel):
        return "see its keys"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value:g}`" if isinstance(value, float) else f"`{json.dumps(value)}`"


def _values(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """Allowed values in words, from a JSON schema."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        inside = schema["$defs"][name]
        if name == "Source":
            return "string or table"
        return "table" if inside.get("type") == "object" else _values(inside, schema)
    for union in ("anyOf", "oneOf"):
        if union in field:
            parts = [_values(part, schema) for part in field[union] if part.get("type") != "null"]
            return " or ".join(dict.fromkeys(parts))
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    match field.get("type"):
        case "array" if "prefixItems" in field:
            return f"list of {len(field['prefixItems'])}: {_values(field['prefixItems'][0], schema)}"
        case "array":
            return f"list of {_values(field.get('items', {}), schema)}"
        case "object":
            inside = field.get("additionalProperties")
            if isinstance(inside, dict) and inside.get("$ref", "").endswith("/Source"):
                return "table of sources by name"
            return f"table of name = {_values(inside, schema)}" if isinstance(inside, dict) else "table"
        case "boolean":
            return "`true`, `false`"
        case kind:
            bounds = [f"{sign} {field[name]:g}" for name, sign in _BOUNDS.items() if name in field]
            return " ".join([kind or "any", " and ".join(bounds)]).strip()
