"""Requests become a step: the trie of their tokens, what it costs, and the hashes of its blocks; pure data.

May import serving/requests.
"""
