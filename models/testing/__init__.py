"""Tiny models and stacks of layers, for tests and benchmarks alone. May import every room of models."""
