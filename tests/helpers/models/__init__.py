"""Tiny models and stacks of layers, for tests and benchmarks. Start reading with `tiny.py` and `moe_stack.py`."""
