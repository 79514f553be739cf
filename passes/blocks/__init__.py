"""MoE blocks are found, and brought to one form: a gather, and experts that read it. May import graph, ops, ir."""
