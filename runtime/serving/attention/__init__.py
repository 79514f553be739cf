"""Attention over a step's trie and the cached blocks before it, for unmodified models of transformers.

May import serving/cache, serving/batching.
"""
