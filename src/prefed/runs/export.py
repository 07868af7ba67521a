"""What leaves a finished run: its models as folders, and a repository on the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefed.core import Owner, Tensors, files
from prefed.core.text import printable
from prefed.models import Backbone, ModelConfig, save_adapter, save_client, save_merged
from prefed.models.adapters import ABOUT, EXPORTED
from prefed.models.quiet_libraries import silence_transformers
from prefed.runs.loaded_run import load_run
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


PLACES = {
    "adapter_config.json": ("base_model_name_or_path",),
    ABOUT: ("model", "name"),
    "config.json": ("_name_or_path",),
}
"""File of an export → the key in it that names the base model."""


class HubError(ValueError):
    """The hub did not take a model. The message says what was published, and what to do."""


def check_target(repo: str) -> None:
    """See that a repository's name can be one, and that there is a token; nothing is sent.

    Raises:
        HubError: the name cannot be one, or there is no token.
    """
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo, re.ASCII):
        raise HubError(
            f"{repo!r} is no repository's name: write it as OWNER/NAME, of letters, digits, -, _ and ."
        )
    if get_token() is None:
        raise HubError("there is no token for the hub: `hf auth login`, or put one into HF_TOKEN")


def name_base(folder: Path, base: str) -> None:
    """Write ``base`` as the base model's name into an exported folder, in the place of a path."""
    for name, keys in PLACES.items():
        path = folder / name
        if not path.exists():
            continue
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        table = content
        for key in keys[:-1]:
            table = table[key]
        if keys[-1] in table:
            table[keys[-1]] = base
            files.write(path, json.dumps(content, indent=2).encode() + b"\n")


def publish(folder: Path, repo: str, *, public: bool = False, update: bool = False) -> str:
    """Commit an exported folder to a repository of the hub.

    Args:
        repo: ``OWNER/NAME``. It is made, private unless ``public``.
        update: the repository is there already, and an earlier export in it is replaced.

    Returns:
        The commit's address.

    Raises:
        HubError: the hub cannot be reached, or does not take it.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="prefed")
    with _errors(repo, api.endpoint, "nothing was published"):
        if update:
            private = bool(api.repo_info(repo).private)
            if private == public:
                raise HubError(_other_visibility(repo, private=private))
        else:
            api.create_repo(repo, private=not public)
    state = "it is as it was" if update else f"{repo} is there and empty: push again with --update"
    with _errors(repo, api.endpoint, state):
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Model exported by prefed",
            # Files of an earlier export that this one does not have.
            delete_patterns=list(EXPORTED) if update else None,
        )
    return str(commit.commit_url)


def _other_visibility(repo: str, *, private: bool) -> str:
    if private:
        return f"{repo} is private: leave --public out, or make it public on its page first"
    return f"{repo} is public: with --public everybody may read the model; without, take another repository"


@contextmanager
def _errors(repo: str, endpoint: str, state: str) -> Iterator[None]:
    """Errors of huggingface_hub as a :class:`HubError`.

    Args:
        state: what the hub has of the model if it fails.
    """
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HubError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        told = f" ({printable(error.server_message)})" if error.server_message else ""
        raise HubError(f"{_reason(repo, status)}{told}; {state}") from error
    except Exception as error:  # the classes of network errors differ between versions of the library
        cause = error.__cause__ or error
        reason = (str(cause).strip().splitlines() or [""])[0]
        text = f"the hub at {endpoint} cannot be used ({type(cause).__name__}: {printable(reason)}); {state}"
        raise HubError(text) from error


def _reason(repo: str, status: int) -> str:
    reasons = {
        401: "the hub does not take the token (401): `hf auth login`, or put another one into HF_TOKEN",
        403: f"the token may not write to {repo} (403): take one that may write there",
        404: f"the hub knows no {repo}, or the token may not see it (404)",
        409: f"{repo} is there already, or is being changed (409): --update replaces the model in it",
    }
    return reasons.get(status, f"the hub answers {status} for {repo}")
