"""A federation of organisations: a hub that coordinates, and sites whose data and private states stay there."""
