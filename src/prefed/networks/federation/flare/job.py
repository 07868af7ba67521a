"""The job that opens a session between a hub and its sites: three JSON files, and no code.

NVIDIA FLARE's own recipe for a Collab job copies the source of its objects into the job. Sites that refuse
foreign code refuse such a job, rightly. The files here name classes of the installed packages alone, which
``class_allow_list`` of each kit allows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
HUB_RELAY = "prefed.networks.federation.flare.apps.HubRelay"
SITE_RELAY = "prefed.networks.federation.flare.apps.SiteRelay"
REGISTRATION = "prefed.networks.federation.flare.apps.Registration"
"""A component of each site's kit."""
ALLOWED = (CONTROLLER, EXECUTOR, HUB_RELAY, SITE_RELAY)
"""All classes that a job may name."""
THREADS = 8
"""Calls that each side may have under way."""


def write_job(folder: Path, sites: Sequence[str], setup: float) -> None:
    """Write the job for these sites into ``folder``.

    Args:
        setup: seconds in which all sites must have started their process of the job.
    """
    filters: dict[str, list[str]] = {"task_data_filters": [], "task_result_filters": []}
    threads = THREADS * len(sites)
    controller = {"server_obj_id": "_server", "sync_task_timeout": setup, "max_call_threads": threads}
    server = {
        "workflows": [{"id": "controller", "path": CONTROLLER, "args": controller}],
        "components": [{"id": "_server", "path": HUB_RELAY, "args": {}}],
    }
    executor = {"path": EXECUTOR, "args": {"client_obj_id": "_client", "max_call_threads": THREADS}}
    client = {
        "executors": [{"tasks": ["*"], "executor": executor}],
        "components": [{"id": "_client", "path": SITE_RELAY, "args": {}}],
    }
    meta = {
        "name": "prefed",
        "resource_spec": {},
        "deploy_map": {"app": ["server", *sites]},
        "min_clients": 1,
    }
    (folder / "app" / "config").mkdir(parents=True)
    for name, content in {
        "meta.json": meta,
        "app/config/config_fed_server.json": {"format_version": 2, **server, **filters},
        "app/config/config_fed_client.json": {"format_version": 2, **client, **filters},
    }.items():
        (folder / name).write_text(json.dumps(content, indent=1))
