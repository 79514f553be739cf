"""The routes that ask the model, one file for each API family: bodies, requests to the ranks, replies and errors.

Start at `service.py`, which all families use, then read `decision_routes.py`.

May import serving/questions, serving/batching, serving/requests.
"""
