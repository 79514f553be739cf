"""The graph becomes segments, a segment of experts a program by expert, one of tokens a program for some of them.

May import rows, blocks, cost, graph, ir.
"""
