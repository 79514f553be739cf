"""CUDA graphs: records the segments of a graph when its shapes repeat, and replays them on the same memory.

Start reading at `segment_graphs`, whose docstring says why memory is never reused too early.

May import system.
"""
