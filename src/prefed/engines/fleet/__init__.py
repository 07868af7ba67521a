"""A fleet of clients on a virtual clock: who is asked when, from which model it starts, when it replies."""

from prefed.engines.fleet.config import FleetConfig
from prefed.engines.fleet.schedule import FleetError, ScheduledRound, Visit, schedule

__all__ = ["FleetConfig", "FleetError", "ScheduledRound", "Visit", "schedule"]
