"""Serving: requests in tokens become steps of a model, and the steps become answers.

Start with `requests` for the records, then `engine` for one rank, `router` for the choice of a rank, and `workers` for
the processes around both. `routes` and `http` are the API, `offline` scores files without a server.

Imports no other folder.
"""
