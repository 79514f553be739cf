"""FLOPs and bytes of every node, in the symbols of the graph's shapes. Start at `graph_cost.py`, the pass.

May import graph, ops, ir.
"""
