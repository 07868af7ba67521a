"""FLARE's own controller of a session, which waits for all sites: the control of ``members.py``."""

from __future__ import annotations

from typing import Any

from nvflare.collab.runtime.controller import CollabController


class Barrier(CollabController):  # type: ignore[misc]
    """FLARE's controller, which announces the sites once all are set up."""

    def _process_setup_reply(self, client_task: Any, fl_ctx: Any) -> None:
        super()._process_setup_reply(client_task, fl_ctx)
        if all(self.client_setup_status.values()):
            for site in self.client_setup_status:
                self.server_app.obj.join(site)
