"""``prefed collect``: a local web page on which a person chooses the better of two responses.

The package imports none of its modules, as only the response generator needs PyTorch and only the server
Starlette.
"""
