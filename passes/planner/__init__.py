"""Costs become decisions: simulation, search, strategies, the forecast of a model on a machine.

May import cost, machine, ir.
"""
