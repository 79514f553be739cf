"""Checkpoint folders: their files and stamps, and how weights are made of stored tensors. May import sizes, demo."""
