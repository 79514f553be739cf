"""Layouts of quantised matrices in published checkpoints, and their decoding. May import: nothing but `models`.

Start with `layout.py`, the record of one layout; `quantized_matrices.py` finds the matrices of a checkpoint.
"""
