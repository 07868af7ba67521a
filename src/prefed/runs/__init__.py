"""Runs: built from an experiment, carried out, resumed, read again, evaluated again."""
