"""Export models of a finished run to folders, and publish them on the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prefed.core import Owner, Tensors, files
from prefed.core.text import printable
from prefed.models import Backbone, ModelConfig, save_adapter, save_client, save_merged
from prefed.models.adapter_files import ABOUT, EXPORTED
from prefed.models.trainable_parts import EXAMPLES
from prefed.runs.exports_log import record_copy
from prefed.runs.finished_run import RunError
from prefed.runs.loaded_run import load_run
from prefed.runs.tastes import needs_pairs
from prefed.store import RunReader

IN_ADAPTER = frozenset({"lora", "personal_lora", "gate", "residual"})
"""Parts of a model that an adapter folder can contain; a residual must be zero."""


@dataclass(frozen=True)
class Export:
    """An exported model of a run.

    Attributes:
        client: the owner of a personal model, else ``None``.
        selector: the name of a selector, else ``None``.
        aligned: whether the server has aligned it.
        taste: the fixed taste of an aligned model, else ``None``.
        merged: whether it is a full model, not an adapter.
        more: parts besides the adapter; with any, PEFT cannot load the folder.
        model: the base model.
    """

    client: str | None
    selector: str | None
    aligned: bool
    taste: str | None
    merged: bool
    more: tuple[str, ...]
    model: ModelConfig

    def describe(self, folder: Path) -> str:
        """Describe the folder for the terminal: one line on what it holds, and the code that loads it."""
        held = self.more if "weights" in self.more else ("adapter", *self.more)
        parts = f" ({', '.join(held)})" if self.more and not self.merged else ""
        what = "model" if self.merged or self.more else "adapter"
        code = (f"  {line}" for line in self.code(str(folder)))
        return "\n".join([f"{what}: {folder}{parts}", "to load it:", *code])

    def code(self, folder: str, base: str | None = None, *, hub: bool = False) -> list[str]:
        """Return Python code that loads the model, as lines.

        Args:
            folder: a path, or with ``hub`` the name of a repository.
            base: the name of the base model; defaults to that of the run.
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
    """Write the shared model of a run, or the selected one, into ``folder``.

    Args:
        client: the personal model of this client; with ``taste`` or ``aligned``, the client whose taste is
            used.
        selector: the selector with this number.
        taste: the aligned model, with this taste.
        aligned: the aligned model; if it takes a taste, with that of ``client`` or of the population.
        merge: write a full model, not an adapter.
        best: after the best round on validation pairs, instead of the last.

    Raises:
        RunError: there is no finished run, or it has no such client, selector or model.
        ModelError: the format of the folder does not support the model.
    """
    loaded_run = load_run(run, data=needs_pairs(taste), best=best)
    backbone, name = loaded_run.backbone, None
    if EXAMPLES in backbone.needs:
        raise RunError(
            f"{run}: {loaded_run.method.name} trains nothing, so there is nothing to export: use the base "
            f"model {backbone.config.name!r}, with a client's pairs as examples in the prompt"
        )
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
        # In the shared model, personal parts have their initial values, which have no effect.
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
    """Write ``tensors`` (full layout) as an adapter, as a client folder if there are other parts, or merged.

    Args:
        names: the tensors that matter; defaults to all.

    Returns:
        The parts besides the adapter.

    Raises:
        ModelError: the format of the folder does not support the model.
    """
    counted = tensors.layout.names if names is None else names
    parts = {tensors.layout[name].part for name in counted}
    more = tuple(sorted(parts - IN_ADAPTER))
    (save_merged if merge else save_client if more else save_adapter)(backbone, tensors, folder)
    return more


def record_export(run: Path, what: Literal["export", "push"], to: Path | str, exported: Export) -> None:
    """Let the run know a copy of its model.

    Args:
        to: the folder, or the URL of the commit on the hub.
    """
    about = {name: value for name, value in vars(exported).items() if name != "model" and value}
    record_copy(run, what, to, {"round": RunReader(run).commit.round, **about})


PLACES = {
    "adapter_config.json": ("base_model_name_or_path",),
    ABOUT: ("model", "name"),
    "config.json": ("_name_or_path",),
}
"""File of an export → path of the key for the base model's name."""


class HubError(ValueError):
    """A model could not be published on the hub. The message says what was published."""


def check_target(repo: str) -> None:
    """Check the name of a repository, and that there is a token. Sends nothing.

    Raises:
        HubError: the name is invalid, or there is no token.
    """
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo, re.ASCII):
        raise HubError(
            f"{repo!r} is not a valid repository name: use OWNER/NAME with letters, digits, '-', '_' and '.'"
        )
    if get_token() is None:
        raise HubError("no token for the hub: run `hf auth login`, or set HF_TOKEN")


def name_base(folder: Path, base: str) -> None:
    """Replace the name of the base model in an exported folder, which may be a local path."""
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
    """Commit an exported folder to a repository on the hub.

    Args:
        repo: ``OWNER/NAME``. It is created, private unless ``public``.
        update: the repository exists; replace an earlier export in it.

    Returns:
        The URL of the commit.

    Raises:
        HubError: the hub cannot be reached, or rejects the commit.
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
    state = "nothing was changed" if update else f"{repo} exists and is empty: push again with --update"
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
        return f"{repo} is private: leave out --public, or make the repository public on the hub first"
    return f"{repo} is public: add --public to let everybody read the model, or choose another repository"


@contextmanager
def _errors(repo: str, endpoint: str, state: str) -> Iterator[None]:
    """Convert errors of huggingface_hub to :class:`HubError`.

    Args:
        state: what an error leaves on the hub.
    """
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HubError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = f" ({printable(error.server_message)})" if error.server_message else ""
        raise HubError(f"{_reason(repo, status)}{reason}; {state}") from error
    except Exception as error:  # the classes of network errors differ between versions of the library
        cause = error.__cause__ or error
        reason = (str(cause).strip().splitlines() or [""])[0]
        text = f"the request to {endpoint} failed ({type(cause).__name__}: {printable(reason)}); {state}"
        raise HubError(text) from error


def _reason(repo: str, status: int) -> str:
    reasons = {
        401: "the hub rejected the token (401): run `hf auth login`, or set HF_TOKEN to a valid token",
        403: f"the token has no write access to {repo} (403): use a token with write access",
        404: f"{repo} does not exist on the hub, or the token has no access to it (404)",
        409: f"{repo} already exists, or is being changed (409): replace the model in it with --update",
    }
    return reasons.get(status, f"the hub returned status {status} for {repo}")
