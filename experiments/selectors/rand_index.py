"""Do FedBiscuit's clusters find the clients' tastes? The adjusted Rand index of each grouping of a run.

    python experiments/selectors/rand_index.py RUN…

For each run that has clusters it prints the accuracy of each client's own cluster's selector, that of the
vote, and for each round that grouped the clients the adjusted Rand index of clusters against tastes (Hubert
and Arabie 1985): 1 for clusters that are the tastes, 0 on average for clusters that have nothing to do with
them. A client's taste is in the column ``taste`` of the run's training file, which mixes.py wrote.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from pathlib import Path

from mixes import read

from prefed.config import Experiment


def adjusted_rand_index(clusters: Sequence[Sequence[str]], tastes: Mapping[str, str]) -> float:
    """How far clusters agree with tastes, corrected for chance (Hubert and Arabie 1985, eq. 5).

    >>> adjusted_rand_index([["a", "b"], ["c", "d"]], {"a": "x", "b": "x", "c": "y", "d": "y"})
    1.0

    Args:
        clusters: the clients of each cluster.
        tastes: client → its taste.

    Returns:
        At most 1. NaN where all clients have one taste, so that no clusters could show it.
    """
    groups = [(number, tastes[client]) for number, members in enumerate(clusters) for client in members]

    def pairs(labels: Iterable[object]) -> int:
        """Pairs of clients with the same label."""
        return sum(comb(count, 2) for count in Counter(labels).values())

    together, clustered, alike = pairs(groups), pairs(u for u, _ in groups), pairs(t for _, t in groups)
    everyone = comb(len(groups), 2)
    if alike == everyone:
        return float("nan")
    chance, most = clustered * alike / everyone, (clustered + alike) / 2
    return (together - chance) / (most - chance) if most > chance else 1.0


def groupings(run: Path) -> dict[int, list[list[str]]]:
    """Round → its clusters, for each round that grouped the clients."""
    records = map(json.loads, (run / "rounds.jsonl").read_text("utf-8").splitlines())
    return {record["round"]: record["clusters"] for record in records if record.get("clusters")}


def accuracies(run: Path) -> list[str]:
    """The accuracies of a finished run that depend on its clusters."""
    path = run / "summary.json"
    summary = json.loads(path.read_text("utf-8")) if path.exists() else {}
    names = {"preference_accuracy": "own cluster", "majority_accuracy": "vote"}
    return [f"{label} {summary[name]['mean']:.3f}" for name, label in names.items() if name in summary]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories of FedBiscuit")
    for run in parser.parse_args().runs:
        clusters = groupings(run)
        if not clusters:
            print(f"{run}: no round grouped the clients")
            continue
        source = Experiment.load(run / "config.toml").data.train
        tastes = {row["client"]: row["taste"] for row in read(Path(source.path))}
        indices = [f"round {n} {adjusted_rand_index(each, tastes):.2f}" for n, each in clusters.items()]
        print(f"{run}: {', '.join([*accuracies(run), *indices])}")


if __name__ == "__main__":
    main()
