"""Stored captures: what capture, passes, cutting and compiling gave for a model, on disk for the next process.

Only processes that run no code of their own store and use them (`process_code`). The key of a capture has what
installed code may branch on while it is traced (`fingerprint`, `value_texts`). The capture itself has what must hold of
each call (`capture_record`). `capture_watch` says what a call compiled, and `capture_store` is the folder.

May import lowering, cuda_graphs, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system, execute.
"""
