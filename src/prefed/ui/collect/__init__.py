"""A page on this machine where a person says which of two responses is the better one.

Nothing here needs a model library but what draws responses, and nothing but the page needs a web server. So
this package imports none of its files by itself.
"""
