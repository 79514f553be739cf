"""Tools to read and write FX graphs: nodes, sizes, collectives, canonical texts, lines of source. Start at `nodes.py`.

May import ops, ir.
"""
