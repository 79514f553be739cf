"""Expert parallelism becomes its proved local form, which all ranks compare.

May import its own rooms, blocks, graph, ir.
"""
