"""The checks of `python -m benchmarks.gpu_acceptance`, by topic. A check returns what it found, or raises."""
