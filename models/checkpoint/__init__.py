"""Checkpoint folders: their files, headers and stamps, and how weights are made of stored tensors. May import sizes."""
