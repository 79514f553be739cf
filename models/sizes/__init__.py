"""Sizes of models: the architecture of a configuration, and presets of well-known models. Start at `architecture.py`.

Imports no other folder.
"""
