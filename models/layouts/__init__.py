"""Layouts of quantised matrices in published checkpoints, and the formula that decodes them.

Start at `layout.py`; `quantized_matrices.py` finds the matrices of a checkpoint. Imports no other folder.
"""
