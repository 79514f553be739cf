"""Knowledge about models: sizes, formulas, checkpoints, the demo. Start at `sizes/architecture.py`.

Imports nothing else of moepass.
"""
