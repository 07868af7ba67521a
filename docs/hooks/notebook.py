r"""MkDocs hook: a Jupyter notebook is a page like any other, with its cells and the outputs that it holds.

The menu and links name it by its file, ``tutorial.ipynb``, which a notebook viewer opens too. The file itself
is next to the page, in ``notebooks/``, to be downloaded.
"""

from __future__ import annotations

import html
import json
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

SUFFIX = ".ipynb"


def markdown(notebook: Mapping[str, Any]) -> str:
    r"""A notebook's cells as the text of a page.

    >>> markdown({"cells": [{"cell_type": "markdown", "source": ["# Tutorial\n", "Text."]}]})
    '# Tutorial\nText.\n'
    """
    parts: list[str] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append("".join(cell["source"]))
        elif cell["cell_type"] == "code":
            parts.append(_fenced("python", "".join(cell["source"])))
            parts += [shown for output in cell["outputs"] for shown in _outputs(output)]
    return "\n\n".join(parts) + "\n"


def _outputs(output: Mapping[str, Any]) -> Iterator[str]:
    """What a cell has printed, its last value, and its pictures."""
    if output["output_type"] == "stream":
        yield _fenced("text", "".join(output["text"]))
        return
    data = output["data"]
    if "image/png" in data:
        # The base64 of a picture is one line or several, as the program wrote it that saved the notebook.
        picture = "".join("".join(data["image/png"]).split())
        text = html.escape(output["metadata"].get("image/png", {}).get("alt", ""))
        yield f'<img alt="{text}" src="data:image/png;base64,{picture}">'
    else:
        yield _fenced("text", "".join(data["text/plain"]))


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.strip(chr(10))}\n```"


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """MkDocs calls this with all files: each notebook becomes a page, and a file to download."""
    from mkdocs.structure.files import File

    class Notebook(File):
        def is_documentation_page(self) -> bool:
            return True

    for file in [file for file in files if file.src_uri.endswith(SUFFIX)]:
        files.remove(file)
        files.append(Notebook(file.src_uri, config.docs_dir, config.site_dir, config.use_directory_urls))
        files.append(File.generated(config, _download(file.src_uri), content=file.content_bytes))
    return files


def _download(uri: str) -> str:
    return posixpath.join("notebooks", uri)


def on_page_read_source(page: Any, **_: Any) -> str | None:
    """MkDocs calls this for each page's text; for any other page than a notebook it reads the file itself."""
    uri = page.file.src_uri
    if not uri.endswith(SUFFIX):
        return None
    link = posixpath.relpath(_download(uri), posixpath.dirname(uri) or ".")
    return f"{markdown(json.loads(page.file.content_string))}\n[The notebook itself]({link})\n"
