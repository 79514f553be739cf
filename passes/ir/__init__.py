"""Records and contracts of the compiler: plans, slot operations, bank layouts, and what a pass is.

Start at `protocol.py` for passes and at `plan.py` for their result.

May import machine.
"""
