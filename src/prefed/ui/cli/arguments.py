"""Arguments shared by several commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from pydantic import ConfigDict
    from pydantic.fields import FieldInfo


class Fields:
    """Options made from fields of settings, which are imported when the command is called.

    Such a parameter of a command receives the values by the names of the fields.

    Attributes:
        settings: class of the settings, ``MODULE:NAME`` in prefed.
        names: names of the fields, each after ``OPTION=`` if its option has another name.
        texts: option → its help, if not the field's description.
        metavars: option → its metavar, if not the field's type.
        defaults: field → default, if not that of the settings.
    """

    def __init__(
        self,
        settings: str,
        names: str,
        texts: Mapping[str, str] = MappingProxyType({}),
        metavars: Mapping[str, str] = MappingProxyType({}),
        **defaults: object,
    ) -> None:
        self.settings, self.texts, self.metavars, self.defaults = settings, texts, metavars, defaults
        words = (word.partition("=") for word in names.split())
        self.names = {option: name or option for option, _, name in words}

    def parameters(self) -> Iterator[inspect.Parameter]:
        """One parameter per option, with the field's type, default, description and constraints."""
        module, _, name = self.settings.partition(":")
        owner = getattr(import_module(f"prefed.{module}"), name)
        for option, name in self.names.items():
            field = owner.__pydantic_fields__[name]
            help = self.texts.get(option, f"{field.description[0].upper()}{field.description[1:]}.")
            above, least, most = (
                next((getattr(each, bound) for each in field.metadata if hasattr(each, bound)), None)
                for bound in ("gt", "ge", "le")
            )
            if above is not None:  # typer has no open ranges
                help = f"{help[:-1]}; above {above}."
            details = typer.Option(
                help=help,
                metavar=self.metavars.get(option),
                min=least,
                max=most,
                callback=_check(field, getattr(owner, "model_config", None)),
            )
            yield inspect.Parameter(
                option,
                inspect.Parameter.KEYWORD_ONLY,
                default=self.defaults.get(name, field.default),
                annotation=Annotated[field.annotation, details],
            )

    def take(self, values: dict[str, Any]) -> dict[str, Any]:
        """Remove the options from the values of a command, and return them by the names of the fields."""
        return {name: values.pop(option) for option, name in self.names.items()}


def _check(field: FieldInfo, config: ConfigDict | None) -> Callable[[Any], Any]:
    """A callback of an option that checks its value as the settings do."""
    from pydantic import TypeAdapter, ValidationError

    checked: Any = Annotated[field.annotation, field]
    adapter: TypeAdapter[Any] = TypeAdapter(checked, config=config)

    def check(value: Any) -> Any:
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            from prefed.config.errors import in_words

            raise typer.BadParameter(f"{value!r} {in_words(error.errors()[0])}") from None

    return check


File = Annotated[Path, typer.Argument(help="The experiment file (TOML).", show_default=False)]
CellName = Annotated[
    str | None,
    typer.Option("--cell", metavar="NAME", help="The cell to use, if the file is a table of experiments."),
]
RoundName = Annotated[
    Literal["last", "best"],
    typer.Option("--round", help="The state after the last round, or after the best one by [stop]."),
]
RunFolder = Annotated[Path, typer.Argument(help="The run directory.", show_default=False)]
RunOut = Annotated[
    Path | None,
    typer.Option("--out", help="The run directory (default: runs/FILE-METHOD-seedSEED)."),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue the run in the directory; fails if there is none."),
]
AutoResume = Annotated[
    bool,
    typer.Option(
        "--auto-resume",
        help="Continue the run in the directory, or start one if there is none: a single command for a "
        "scheduler to repeat.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. method.lr=1e-4."),
]
OwnModel = Annotated[
    str | None,
    typer.Option("--client", metavar="ID", help="A client's own model (default: the shared model)."),
]
SelectorNumber = Annotated[
    int | None,
    typer.Option("--selector", min=0, metavar="N", help="One of several selectors, 0 for the first."),
]
Aligned = Annotated[
    bool,
    typer.Option(
        "--aligned",
        help="The model aligned with the selectors. If it takes a taste: that of --client (default: the "
        "mean over clients).",
    ),
]
TasteName = Annotated[
    str | None,
    typer.Option(
        "--taste",
        metavar="TASTE",
        help="Export the aligned model at this taste; see prefed generate --taste.",
    ),
]
Sampled = Annotated[
    dict[str, Any],
    Fields("train.sampling:Sampling", "max_new_tokens=max_tokens temperature top_p top_k"),
]
PromptColumn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The column of the prompts (default: prompt, or that of preference pairs)."
    ),
]
Raw = Annotated[
    bool,
    typer.Option("--raw", help="Use prompts without a chat template, even if the run's data are dialogues."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON; progress goes to standard error.")
]
Merge = Annotated[
    bool, typer.Option("--merge", help="Export a full model with the adapter merged into its weights.")
]
LicenseName = Annotated[
    str | None,
    typer.Option(
        "--license",
        metavar="NAME",
        help="The licence on the model card, as the hub names it (default: the base model's, if "
        "its card is on this machine).",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="TOOL",
        help="Log the run to tensorboard, wandb, mlflow or trackio, like [track] to; repeatable.",
    ),
]


def run_name(file: Path, cell: str | None) -> str:
    """The name of a run directory, from the experiment file and the cell.

    >>> run_name(Path("tables/imdb.toml"), "imdb-3/fedper")
    'imdb-imdb-3-fedper'
    """
    return f"{file.stem}-{cell.replace('/', '-')}" if cell else file.stem


def given_words(context: typer.Context, without: Collection[str]) -> list[str]:
    """The options given on the command line, as words.

    Args:
        without: names of parameters to leave out, e.g. ``"out"``.
    """
    words = list[str]()
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        if name in without or parameter.param_type_name != "option":
            continue
        value, flag = context.params[name], parameter.opts[0]
        if value is True:
            words.append(flag)
        else:
            values = value if isinstance(value, list | tuple) else [value]
            words += [word for each in values for word in (flag, str(each))]
    return words
