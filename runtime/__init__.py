"""What moves bytes and runs plans. It decides nothing that the plan could have decided."""
