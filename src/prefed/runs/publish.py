"""An exported folder as a repository of the Hugging Face hub.

The token is the one that huggingface_hub finds, in ``HF_TOKEN`` or where ``hf auth login`` keeps it. It is
written nowhere, and stands in no message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefed.core import files
from prefed.core.text import printable
from prefed.models.adapters import ABOUT, EXPORTED

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
