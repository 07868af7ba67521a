"""Secure sums over NVIDIA FLARE: do real processes of a hub and its sites run them, and what do they cost?

    python benchmarks/secure_sums.py

Four sites with two clients each, generated pairs, a small generated model, FedDPO. Each site makes its key,
and its ``site.toml`` names those of the others. A plain run, one with secure sums, and one in which a site is
killed for good after the second round.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

from federation_faults import write_experiment
from wards import Federation, prefed, rounds_of

from prefed.core import Key
from prefed.data import synthetic
from prefed.models.tiny import make_tiny

SITES = {"north": 2, "south": 2, "east": 2, "west": 2}
ROUNDS = 4
SUMS = """
[merge]
weights = "uniform"
[privacy]
kind = "distributed"
colluders = 1
clip = 0.3
noise_multiplier = 0.5
delta = 1e-5
"""


def exchange_keys(federation: Federation) -> None:
    """Make each site's key and pin it at the other sites, as people do by telephone."""
    lines = {}
    for site in federation.homes:
        first, *_ = prefed("site", "keys", federation.of(site) / "site.toml").splitlines()
        words = first.removeprefix(f"{site} = ")
        lines[site] = f'{site} = "{words}"\n'
    for site in federation.homes:
        path = federation.of(site) / "site.toml"
        others = "".join(line for name, line in lines.items() if name != site)
        path.write_text(f"{path.read_text()}\n[sites]\n{others}")


def measure(federation: Federation, name: str, more: str, lost: str | None = None) -> None:
    """Run over the sites and print a row for each round."""
    file = write_experiment(federation, name, ROUNDS, "feddpo", more)
    out = federation.folder / f"over-{name}"
    log = out.with_suffix(".log")
    started = time.monotonic()
    with log.open("ab") as stream:
        hub = subprocess.Popen(federation.federate(file, out, "--visit", "60"), stdout=stream, stderr=stream)
    while hub.poll() is None:
        if lost and len(rounds_of(out)) >= 2:
            federation.kill(lost)
            lost = None
        time.sleep(0.1)
    for record in rounds_of(out):
        sums = [record.get(key, "") for key in ("sum_sites", "sum_attempts", "bytes_up", "seconds")]
        print(f"| {name} | {record['round']} | {' | '.join(map(str, sums))} |", flush=True)
    print(f"| {name} | status {hub.returncode}, {time.monotonic() - started:.0f} s |", flush=True)
    if hub.returncode:
        print(log.read_text()[-2000:])


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8792)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    make_tiny(folder / "model", synthetic.corpus(Key(7), 300), Key(7), width=64, steps=20)
    pairs = synthetic.generate(Key(7), clients=sum(SITES.values()), train=16, test=8)
    synthetic.write(folder, pairs)
    federation = Federation(folder, options.port, SITES, "client", folder / "model")
    exchange_keys(federation)
    try:
        federation.start(*SITES)
        measure(federation, "plain", "")
        measure(federation, "sums", SUMS)
        measure(federation, "sums-without-west", SUMS, lost="west")
    finally:
        federation.stop()


if __name__ == "__main__":
    main()
