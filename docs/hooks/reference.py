"""Tables made from the package itself, so that they are never out of date: ``python docs/hooks/reference.py``
writes them into the pages, and MkDocs, of which this is a hook, makes them anew.

In a page, on a line of its own::

    <!-- settings: prefed.config:CohortConfig -->

gives every key of a settings record; with ``beyond MODULE:RECORD`` before the end only the keys that differ
from another record's. ``<!-- methods -->``, ``<!-- objectives -->`` and ``<!-- formats -->`` give the
registries, ``<!-- command: run -->`` the arguments and options of a command.

``<!-- api: prefed.runs.run run RunResult -->`` gives names of a module, or a class and some of its members,
with a line of their documentation. The site has all of it there.

What is between such a line and ``<!-- end -->`` is made here: change the docstring that it comes from.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel

from prefed.config.starting import describe

_MARK = re.compile(
    r"^```.*?^```"
    r"|^(<!-- (settings|methods|objectives|formats|command|api)(?:: (.+?))? -->)$"
    r"(?:\n(?:(?!^<!-- ).)*?^<!-- end -->$)?",
    re.MULTILINE | re.DOTALL,
)
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?(?:[\w.]*\.)?(\w+)`")
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def fill(markdown: str) -> str:
    """A page with every mark outside a code block, and what is below it, replaced by its table.

    >>> fill("<!-- settings: prefed.config:CohortConfig -->").splitlines()[2]
    '| `size` | integer ≥ 1 | – | clients a round; left out with fraction: all of them |'
    >>> fill("<!-- api: prefed.runs.run run -->\\n\\nold\\n\\n<!-- end -->").splitlines()
    ['::: prefed.runs.run', '    options:', '      members: [run]']
    """
    return _MARK.sub(lambda match: _content(match, directive) if match[1] else match[0], markdown)


def current(markdown: str) -> str:
    """A page as it is kept: below every mark outside a code block its table.

    >>> current("<!-- command: methods -->").splitlines()
    ['<!-- command: methods -->', '', '```text', 'prefed methods', '```', '', '<!-- end -->']
    """

    def kept(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{_content(match, members)}\n\n<!-- end -->" if match[1] else match[0]

    return _MARK.sub(kept, markdown)


def _content(match: re.Match[str], api: Callable[..., str]) -> str:
    """What a mark gives, by its kind and its words."""
    kind, words = match[2], (match[3] or "").split()
    match kind:
        case "settings":
            return settings(_record(words[0]), _record(words[2]) if len(words) > 1 else None)
        case "api":
            return api(*words)
        case "command":
            return command(words[0])
        case _:
            return globals()[kind]()  # type: ignore[no-any-return]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this with each page's text."""
    return fill(markdown)


def directive(name: str, *names: str) -> str:
    """What makes mkdocstrings show a module or a class, or some of its members."""
    return f"::: {name}" + (f"\n    options:\n      members: [{', '.join(names)}]" if names else "")


def members(name: str, *names: str) -> str:
    """One row per public name of a module, or for a class and each of ``names`` in it."""
    thing, rows, prefix = pkgutil.resolve_name(name), [], ""
    if isinstance(thing, ModuleType):
        module, names = name, names or tuple(_public(thing))
    else:
        module, _, own = name.rpartition(".")
        prefix = f"{own}."
        rows.append((f"`{_signature(own, thing)}`", _plain(inspect.getdoc(thing) or "")))
    for each in names:
        value = getattr(thing, each)
        documented = inspect.isclass(value) or inspect.isroutine(value)
        about = _plain(inspect.getdoc(value) or "") if documented else _assigned(thing, each)
        rows.append((f"`{prefix}{_signature(each, value)}`", about))
    return _table((f"`{module}`", "what it is"), rows)


def _public(module: ModuleType) -> Iterator[str]:
    """The names that a module hands out: ``__all__``, or all that it defines."""
    if hasattr(module, "__all__"):
        yield from module.__all__
        return
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__ and not isinstance(value, TypeVar)
        if own and not name.startswith("_"):
            yield name


def _signature(name: str, value: Any) -> str:
    """A function with its arguments' names; anything else by its name alone."""
    if not inspect.isroutine(value):
        return name
    words = []
    for argument in inspect.signature(value).parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        if argument.name not in ("self", "cls"):
            stars = {argument.VAR_POSITIONAL: "*", argument.VAR_KEYWORD: "**"}.get(argument.kind, "")
            words.append(f"{stars}{argument.name}" + ("" if argument.default is argument.empty else "=…"))
    return f"{name}({', '.join(words)})"


def _assigned(thing: Any, name: str) -> str:
    """What the text below an assignment says of a value, in the module that it comes from."""
    modules = [thing if isinstance(thing, ModuleType) else inspect.getmodule(thing)]
    for module in modules:
        tree = ast.parse(inspect.getsource(module))
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        sources = (node.module for node in imports if name in {alias.name for alias in node.names})
        modules += map(importlib.import_module, sources)
        for node, after in pairwise(tree.body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
            if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return _plain(inspect.cleandoc(after.value.value))
    return ""


def _plain(documentation: str) -> str:
    """The first paragraph of a docstring on one line, in Markdown."""
    text = " ".join(documentation.partition("\n\n")[0].split())
    return _ROLE.sub(r"`\1`", text).replace("``", "`")


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


def methods() -> str:
    """One row per method, with a link to its page."""
    from prefed.methods import METHODS

    rows = [(f"[`{kind.name}`]({kind.name}.md)", kind.title, kind.source) for kind in METHODS.values()]
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
        columns = ", ".join(f"`{column}`" for column in sorted(form.detected_by))
        rows.append((f"`{form.name}`", f"`{form.hub}`" if form.hub else "–", columns or "–"))
    return _table(("format", "hub set", "told by its columns"), rows)


EVERYWHERE = ("quiet", "verbose")
"""Options that all commands have. The page describes them once."""


def command(name: str) -> str:
    """The usage of a command, and its arguments and options."""
    from prefed.ui.cli import app

    functions = ((each.name, each.callback) for each in app.registered_commands)
    function: Any = next(f for named, f in functions if name == (named or getattr(f, "__name__", "")))
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


if __name__ == "__main__":
    for page in sorted(Path(__file__).resolve().parents[1].rglob("*.md")):
        text = page.read_text("utf-8")
        if (filled := current(text)) != text:
            page.write_text(filled, "utf-8")
            print(page)
