"""Tiny models and stacks of layers, for tests and benchmarks alone.

May import sizes, formulas, checkpoint, reference.
"""
