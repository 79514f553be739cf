"""Hardware profiles, tables of seconds, and formulas for the time of layers and transfers. Start at `hardware.py`.

Imports no other folder.
"""
