"""Peers: the clients of a run without a server, each a process with its own data.

``prefed peer FILE`` starts one; torchrun starts several on one machine.
"""
