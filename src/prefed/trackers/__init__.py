"""Callbacks that show or record how a run goes on, one file each; so far the terminal."""
