"""Which rank computes which request: a state machine without input, output or clock.

May import serving/batching, serving/requests.
"""
