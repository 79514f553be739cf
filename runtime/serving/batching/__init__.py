"""Packing of requests into a step: the trie of their tokens, without those that the cache holds.

Start with `pack.py`, whose pseudo-code names the other modules in order. `step_batch.py` is the result.

May import serving/requests.
"""
