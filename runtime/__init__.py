"""The runtime: executes plans and serves models. Banks, homes, transfers, kernels, lowering, the executor, and serving.

Start reading at `execute/README.md` and `homes/README.md`.
"""
