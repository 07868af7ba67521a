"""Federations over a network: organisations around a hub, and peers without one."""
