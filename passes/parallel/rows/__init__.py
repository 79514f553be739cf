"""Check, node by node, that the activation function computes every row independently.

May import parallel/local_form, rows, graph, ops, ir.
"""
