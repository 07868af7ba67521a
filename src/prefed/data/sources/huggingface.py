"""Read the rows of a dataset on the Hugging Face hub with ``datasets``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from prefed.core import huggingface
from prefed.data.errors import DataError, RowLocation, require
from prefed.data.sources.files import Row

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILE = re.compile(r"\.(jsonl|ndjson|json|csv|parquet|txt|tsv)(\.gz)?$", re.IGNORECASE)


def looks_like_hub_name(path: str) -> bool:
    """Whether ``path`` has the form of a hub name, ``owner/name``.

    >>> looks_like_hub_name("Anthropic/hh-rlhf"), looks_like_hub_name("data/pairs.jsonl")
    (True, False)
    """
    return _NAME.fullmatch(path) is not None and _FILE.search(path) is None


def read_rows(
    name: str, *, subset: str | None, subset_is_folder: bool, split: str, revision: str | None
) -> Iterator[tuple[Row, RowLocation]]:
    """Yield the rows of one split. A dataset in the local cache needs no network.

    ``subset`` is a configuration of the dataset or, with ``subset_is_folder``, a folder in it.

    Raises:
        DataError: ``datasets`` is not installed, or the dataset cannot be loaded. The message contains the
            library's reason and a remedy.
    """
    title = f"{name}{f'/{subset}' if subset else ''} ({split})"
    require("datasets", f"{title}, on the Hugging Face hub,")
    with huggingface.in_reach() as answers:
        try:
            data = _load(name, subset, subset_is_folder, split, revision)
        except Exception as error:  # errors of the library, the hub client and the transport
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            if not answers:
                reason = "no answer (or HF_HUB_OFFLINE is set), and the dataset is not in the local cache"
            raise DataError(
                f"could not load {title} from the Hugging Face hub: {reason}\n"
                "Check the name, subset, split and network connection. Offline, copy the JSON lines or "
                "Parquet files of the dataset to this machine, set path to their folder, and set format = "
                f"{name!r}."
            ) from error
    for number, row in enumerate(data, 1):
        yield row, RowLocation(title, number)


def _load(name: str, subset: str | None, subset_is_folder: bool, split: str, revision: str | None) -> Any:
    from datasets import load_dataset

    option = "data_dir" if subset_is_folder else "name"
    try:
        return load_dataset(name, split=split, revision=revision, **{option: subset})
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error) or revision is not None:
            raise
    # The hub stores a Parquet copy of datasets with a loading script, with one folder per configuration.
    return load_dataset(name, data_dir=subset or "default", split=split, revision="refs/convert/parquet")
