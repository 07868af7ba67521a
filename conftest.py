"""Modules that import a package of an extra are no doctests where the package is missing."""

from importlib.util import find_spec

collect_ignore_glob = [
    f"src/prefed/networks/federation/flare/{name}.py"
    for name in ("relays", "site", "transport")
    if find_spec("nvflare") is None
]
