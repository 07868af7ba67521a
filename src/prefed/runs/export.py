"""A model of a finished run as a folder that PEFT, or transformers alone, loads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prefed.core import Owner, Tensors
from prefed.models import Backbone, ModelConfig, save_adapter, save_client, save_merged
from prefed.models.notices import silence_transformers
from prefed.runs.loaded import load_run
from prefed.runs.tastes import needs_pairs

IN_ADAPTER = frozenset({"lora", "personal_lora", "gate", "residual"})
"""Parts of a model that an adapter folder can hold; a residual is refused unless it is zero."""


@dataclass(frozen=True)
class Export:
    """Which model of a run a folder holds, and as what.

    Attributes:
        client: whose own model it is; ``None`` for one that is nobody's own.
        selector: the selector's name; ``None`` for another model.
        aligned: whether it is the model that the server aligned.
        taste: the taste that this one has been given; ``None`` where it takes none.
        merged: whether it is a whole model.
        more: parts that are in no adapter; a folder with such is not loaded by PEFT.
        model: the base model.
    """

    client: str | None
    selector: str | None
    aligned: bool
    taste: str | None
    merged: bool
    more: tuple[str, ...]
    model: ModelConfig

    def heading(self, folder: Path) -> str:
        """What the folder holds, in a line for the terminal."""
        if self.merged:
            return f"model: {folder}"
        held = self.more if "weights" in self.more else ("adapter", *self.more)
        return f"model: {folder} ({', '.join(held)})" if self.more else f"adapter: {folder}"

    def code(self, folder: str, base: str | None = None, *, hub: bool = False) -> list[str]:
        """Lines of Python that load it.

        Args:
            folder: where it is, a path or with ``hub`` a name there.
            base: the base model's name; left out: that of the run.
        """
        if self.merged:
            return [
                "from transformers import AutoModelForCausalLM",
                f"model = AutoModelForCausalLM.from_pretrained({folder!r})",
            ]
        if self.more and hub:
            return [
                "from huggingface_hub import snapshot_download",
                "from prefed.models import load_client",
                f"model = load_client(snapshot_download({folder!r}), {base or self.model.name!r}).model",
            ]
        if self.more:
            return ["from prefed.models import load_client", f"model = load_client({folder!r}).model"]
        name, dtype = base or self.model.name, self.model.dtype
        revision = "" if self.model.revision is None else f"revision={self.model.revision!r}, "
        return [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            f"base = AutoModelForCausalLM.from_pretrained({name!r}, {revision}dtype={dtype!r})",
            f"model = PeftModel.from_pretrained(base, {folder!r})",
        ]


def write_model(
    run: Path,
    folder: Path,
    *,
    client: str | None = None,
    selector: int | None = None,
    taste: str | None = None,
    aligned: bool = False,
    merge: bool = False,
    best: bool = False,
) -> Export:
    """Write the model that all clients share, or the one that is asked for, into ``folder``.

    Args:
        client: whose own model; with ``taste`` whose aligned one.
        selector: one of several selectors, by its number.
        taste: the aligned model that takes a taste, at this one.
        aligned: the aligned model; one that takes a taste at that of ``client``, or of the population.
        merge: a whole model, not an adapter.
        best: after the best round by validation pairs, and not after the last.

    Raises:
        RunError: there is no finished run, or no such client, selector, single model or aligned one.
        ModelError: the folder's format has no place for the model.
    """
    silence_transformers()
    loaded_run = load_run(run, data=needs_pairs(taste), best=best)
    backbone, name = loaded_run.backbone, None
    more: tuple[str, ...] = ()
    if taste is not None or aligned:
        from prefed.runs.responses import Models
        from prefed.train.generation import Sampling

        models = Models(loaded_run, Sampling())
        side = models.aligned_at(client, taste)
        backbone = side.backbone
        if merge:
            save_merged(backbone, side.tensors, folder, side.taste)
        else:
            models.save_adapter(side, folder)
        if models.takes_tastes:
            taste = taste or client or "population"
    else:
        name = None if selector is None else f"selector-{selector}"
        if client is not None:
            tensors = loaded_run.model(client)
        else:
            tensors = loaded_run.published_model if name is None else loaded_run.selector(name)
        # In the model that all share, personal parts are untouched and change nothing.
        names = loaded_run.method.ownership.names(Owner.SHARED) if client is None else None
        more = write_tensors(backbone, tensors, folder, merge=merge, names=names)
    return Export(client, name, aligned or taste is not None, taste, merge, more, backbone.config)


def write_tensors(
    backbone: Backbone,
    tensors: Tensors,
    folder: Path,
    *,
    merge: bool = False,
    names: Iterable[str] | None = None,
) -> tuple[str, ...]:
    """Write ``tensors`` (full layout) as an adapter, as a client's folder where no adapter holds them, or
    merged.

    Args:
        names: the tensors that count; left out: all.

    Returns:
        The parts of them that are in no adapter.

    Raises:
        ModelError: the folder's format has no place for the model.
    """
    counted = tensors.layout.names if names is None else names
    parts = {tensors.layout[name].part for name in counted}
    more = tuple(sorted(parts - IN_ADAPTER))
    (save_merged if merge else save_client if more else save_adapter)(backbone, tensors, folder)
    return more
