"""Dense experts, which compute every token or capacity slot: passes that compute only results that are read.

May import loops, masks, rows, blocks, graph, ops, ir.
"""
