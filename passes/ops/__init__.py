"""Facts about operators, each written once, and walks over graphs. Start at `traits.py`.

Imports no other folder.
"""
