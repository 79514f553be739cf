"""Measures this machine: GEMMs, attention, copies, collectives. May import every room; none imports it."""
