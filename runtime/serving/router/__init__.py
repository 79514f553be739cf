"""The router: it chooses the rank that computes each request. A state machine without input, output or clock.

Start with `README.md` for the rules and `router.py` for the events.

May import serving/batching, serving/requests.
"""
