"""Every row goes through the activation function alone: followed node by node.

May import parallel/local_form, rows, graph, ops, ir.
"""
