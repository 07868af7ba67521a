"""Peers: each client of a federation without a server is a process with its own data.

``prefed peer FILE`` starts one; torchrun starts several on one machine.
"""
