"""Measurements of moepass. Run one from the root of the repository, such as `python -m benchmarks.overlap`."""
