"""Where a run is followed: the terminal."""
