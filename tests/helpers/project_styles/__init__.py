"""MoE layers with expert parallelism, written as other projects write them, for tests and benchmarks.

Each layer is a module `Layer(sizes, group)` of one rank, with `forward(hidden [tokens, H]) -> [tokens, H]`. It has the
mechanics of the project in its name (dispatcher, splits, loops), but none of its code.
"""
