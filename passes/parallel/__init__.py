"""Expert parallelism becomes its proved local form, which all ranks compare.

May import parallel/proof, parallel/mock, parallel/ranges, parallel/rows, parallel/local_form, parallel/match,
rows, blocks, graph, ops, ir.
"""
