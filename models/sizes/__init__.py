"""The architecture of a configuration, and presets of well-known ones. Imports no other room."""
