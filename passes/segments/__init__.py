"""The graph becomes segments, and a segment of experts a program by expert. May import blocks, cost, graph, ir."""
