"""The schedule of banks: slots, the order of slot operations, and the proof that it is safe.

Start at `assign_slots.py`, then `schedule_slots.py` and `verify.py`.

May import planner, parallel, parallel/match, blocks, graph, ops, ir.
"""
