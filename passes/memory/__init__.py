"""Memory that the activations of a run take at once, counted from the graph alone. Start at `activation_memory.py`.

May import segments, graph, ops, ir.
"""
