"""Moves bytes and runs plans. Decides nothing that the plan could have decided."""
