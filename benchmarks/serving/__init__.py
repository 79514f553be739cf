"""Measurements of serving: throughput, faults, overload, routing, and offline scoring."""
