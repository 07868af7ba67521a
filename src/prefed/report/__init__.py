"""The results of finished runs: tables for the terminal, plots, and an HTML page that explains itself."""

from prefed.runs.record import RunError, RunRecord, read_run

__all__ = ["RunError", "RunRecord", "read_run"]
