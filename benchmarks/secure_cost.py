"""What a secure sum costs a site in a round, next to a plain upload: CPU time and bytes.

    OMP_NUM_THREADS=1 python benchmarks/secure_cost.py

For float32 updates of 0.3, 3 and 30 MB among 3, 10 and 100 sites with one client each, where a sum saves no
upload. Bytes are of whole messages, with headers. CPU milliseconds, the least of three: ``plain`` encodes the
update, ``whole`` clips it into whole numbers, ``noise`` draws the site's share, ``masks`` adds those of all
other sites, ``sign`` packs and signs. ``hub`` checks and adds up all uploads, per site. ``visit`` is a visit
to a client of the tiny model with a LoRA of 3 MB: six steps of eight pairs.
"""

from __future__ import annotations

import argparse
import os
import secrets
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from common import SHARED, TOKENIZER, T, cpu_ms, timed

from prefed.config import Experiment
from prefed.core import Download, Entry, Layout, Privacy, Tensors, Upload
from prefed.core.wire import encode
from prefed.engines import Task, run_task
from prefed.models.pretrained import silence_transformers
from prefed.networks.federation.messages import Keys, Sum, Visit, settings_of
from prefed.networks.federation.unix_socket import pack
from prefed.privacy import Grid, source_of
from prefed.privacy.secure import Identity, Participant, check_members, check_upload, fingerprint, sum_words
from prefed.runs.build import build_job
from prefed.store import ClientStateFiles

SIZES = {"0.3": 75_000, "3": 750_000, "30": 7_500_000}
"""MB of an update → float32 numbers."""
RUN = "0" * 16
PRIVACY = Privacy(kind="distributed", clip=0.3, noise_multiplier=2.0, delta=1e-5, colluders=0)


def row(size: int, sites: int) -> list[str]:
    """A row of the table, from the site that is first by name."""
    names = [f"site-{number:03d}" for number in range(sites)]
    identities = {name: Identity(secrets.token_bytes(32)) for name in names}
    all_sites = [Participant(own, "wards", RUN, name) for name, own in identities.items()]
    site = all_sites[0]
    pins = {name: fingerprint(own.public) for name, own in identities.items()}
    layout = Layout((Entry("weight", (size,), "adapter"),))
    model = Tensors(layout, torch.randn(size, generator=torch.Generator().manual_seed(0)))
    upload = Upload("client", 1.0, {"model": model}, {}, 1)
    body = encode(Download({"model": model}, {}))
    common = {"federation": "wards", "run": RUN, "round": 1, "exchange": "train", "order": "0" * 64}
    visit = Visit.model_validate({**common, "kind": "visit", "client": "client", "asked": 0, "receipt": None})
    request = Sum.model_validate(
        {
            **common,
            "attempt": 1,
            "size": size,
            "members": [Keys.of(each.member) for each in all_sites],
            "clients": {"client": None},
        }
    )
    session = request.of(settings_of("experiment", ["client"], []), body)
    about = {"client": "client", "withheld": "", "asked": 0, "receipt": None}
    plain_ms, plain = least(lambda: pack(encode(upload), **about))
    grid = Grid.of(PRIVACY, sites, sites)
    step = model.flat.double().numpy() * (0.3 / float(model.flat.double().norm()))
    whole_ms, words = least(lambda: grid.words(step))
    noise_ms = cpu_ms(lambda: grid.noise(size, source_of(None)))
    check_ms, _ = least(lambda: check_members(session, site.member, pins, 3))
    mask_ms, masked = least(lambda: site.mask(words.astype(np.uint32), session))
    data = masked.tobytes()

    def signed() -> bytes:
        return pack(masked.tobytes(), receipts={}, signature=site.sign(data, {}, session).hex())

    sign_ms, answer = least(signed)
    signature = site.sign(data, {}, session)
    hub_ms = least(lambda: check_upload(data, {}, signature, session, site.member))[0]
    hub_ms += least(lambda: sum_words([masked, masked]))[0] / 2
    down = len(pack(body, **request.model_dump())) / len(pack(body, **visit.model_dump()))
    times = (plain_ms, whole_ms, noise_ms, check_ms + mask_ms, sign_ms, hub_ms)
    return [
        f"{len(plain):,}",
        f"{len(answer) / len(plain):.3f}",
        f"{down:.3f}",
        *(f"{t:,.1f}" for t in times),
    ]


def least(work: Callable[[], T]) -> tuple[float, T]:
    """The least CPU milliseconds of three turns, and the result."""
    turns = [timed(work) for _ in range(3)]
    return min(turn[0] for turn in turns), turns[0][1]


def visit_ms() -> tuple[float, int]:
    """CPU milliseconds of a visit, and the bytes of its upload."""
    experiment = Experiment.model_validate(
        {
            "rounds": 1,
            "data": {
                "train": str(SHARED / "data" / "personas.train.jsonl.gz"),
                "partition": {"by": "column", "column": "persona"},
                "limit": 48,
            },
            "model": {"name": str(TOKENIZER), "lora": {"rank": 48, "dropout": 0.0}},
            "method": {"name": "feddpo", "lr": 1e-3, "local_steps": 6, "batch_size": 8},
            "engine": {"threads": 1},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        job = build_job(experiment, Path(folder))
        states = ClientStateFiles(Path(folder))
        times, size = [], 0
        for client in job.members[:4]:
            server = job.method.init_server(job.trainers.initial)
            sent = encode(job.method.exchanges[0].send(server, client, job.round(1)))
            spent, result = timed(partial(run_task, job, Task("visit", client, 1, "train", sent), states))
            times.append(spent)
            size = len(result.message)
    return float(np.median(times[1:])), size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=[*SIZES], choices=[*SIZES], metavar="MB")
    parser.add_argument("--sites", nargs="+", type=int, default=[3, 10, 100])
    args = parser.parse_args()
    silence_transformers()
    torch.set_num_threads(1)
    spent, size = visit_ms()
    print(f"visit: {spent:,.0f} ms, upload {size:,} bytes\n")
    names = "MB", "sites", "plain bytes", "up", "down", "plain", "whole", "noise", "masks", "sign", "hub"
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for mb in args.sizes:
        for sites in args.sites:
            print(f"| {mb} | {sites} | {' | '.join(row(SIZES[mb], sites))} |", flush=True)


if __name__ == "__main__":
    main()
