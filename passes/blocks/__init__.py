"""Detection of MoE blocks, and their canonical form: a gather, and experts that read it. May import graph, ops, ir."""
