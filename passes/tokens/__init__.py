"""What of a graph treats every token alone, brought together so that it can run some tokens at a time.

May import rows, blocks, graph, ops, ir.
"""
