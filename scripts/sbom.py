"""Complete the CycloneDX SBOM of a wheelhouse: the hash of each package's wheel, from requirements.txt.

    python scripts/sbom.py WHEELHOUSE

cyclonedx-py writes sbom.cdx.json from what is installed, which no longer knows its wheels.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any


def canonical(name: str) -> str:
    """A package's name as an index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def complete(sbom: dict[str, Any], requirements: str) -> dict[str, Any]:
    """The SBOM with a hash for each package.

    Raises:
        SystemExit: a package has no licence or is not in the requirements.
    """
    pinned = re.findall(r"^([\w.-]+)==\S+ --hash=sha256:([0-9a-f]{64})$", requirements, re.MULTILINE)
    hashes = {canonical(name): value for name, value in pinned}
    for component in (sbom["metadata"]["component"], *sbom["components"]):
        name = component["name"]
        if canonical(name) not in hashes:
            sys.exit(f"sbom: {name} is installed but not in requirements.txt")
        if not component.get("licenses"):
            sys.exit(f"sbom: {name} declares no licence in its metadata")
        component["hashes"] = [{"alg": "SHA-256", "content": hashes[canonical(name)]}]
    return sbom


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    file = folder / "sbom.cdx.json"
    full = complete(json.loads(file.read_text("utf-8")), (folder / "requirements.txt").read_text("utf-8"))
    file.write_text(json.dumps(full, indent=2) + "\n", "utf-8")
