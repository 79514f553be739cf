"""Stored captures: the compiled graphs of a model on disk, which later processes run without Dynamo and the compiler.

Only processes that run nothing but installed code store and use them (`process_code`). The key of a capture covers
everything that this code may branch on while it is traced (`fingerprint`); the capture itself has the
conditions on each call (`capture_record`). `capture_watch` observes the compilation, and `capture_store` is the folder.
Start with `stored_capture.py`.

May import lowering, cuda_graphs, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system, execute.
"""
