"""MoE layers with expert parallelism, written as other projects write them: for tests and benchmarks.

Each is a module `Layer(sizes, group)` of one rank, with `forward(hidden [tokens, H]) -> [tokens, H]`. It has the
mechanics of the projects that it is named after (dispatcher, splits, loops), in code of our own.

May import reference.
"""
