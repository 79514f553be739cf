"""The records of a plan, the operations of its graphs, the contract of a pass, how banks are packed.

May import machine.
"""
