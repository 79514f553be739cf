"""The planner: from costs to decisions, by simulation, search and comparison of strategies. Start at `make_plan.py`.

May import cost, machine, ir.
"""
