"""Peers: each client of a federation without a server is a process with its own data.

``python -m prefed.networks.peers FILE`` starts one; torchrun starts several on one machine.
"""
