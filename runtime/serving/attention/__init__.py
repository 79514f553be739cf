"""Attention over the trie of a step and the cached blocks before it, for unmodified models of transformers.

Start with `README.md`, then `trie_attention.py` for the operator and `trie_parts.py` for the split into kernel calls.

May import serving/cache, serving/batching, system.
"""
