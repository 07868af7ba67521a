"""What method files are written with: the usual moves of a round, settings, schedules, offline PPO."""
