"""A federation of organisations: a hub coordinates; data and private states stay at the sites."""
