"""How much memory the activations of a run take at once, counted from the graph alone.

May import segments, graph, ir.
"""
