"""What a run came to: tables for the terminal, plots, and one page that explains itself."""

from prefed.runs.record import RunError, RunRecord, read_run

__all__ = ["RunError", "RunRecord", "read_run"]
