"""The compiler: captured graph and plan in, graph and plan out. Start at `pipeline.py`, the ordered list of passes.

Pure: no stream, process, socket, clock or global state. Everything here runs on fake tensors without a GPU.
"""
