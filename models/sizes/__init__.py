"""Sizes of architectures and of well-known models. Start at `architecture.py`. Imports no other folder."""
