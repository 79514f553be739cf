"""`moepass explain`: the report on a model and a machine, its data and its forms as text, page and trace.

Start reading at `explain_model.py`, which makes the report, and at `report_parts.py`, which defines it.

Imports no other folder.
"""
