"""The expert kernels: what compilers for real GPUs make of them, on any machine, without a GPU.

    python -m benchmarks.kernels --static

Everything is in `parts/static_kernels.py`.
"""

# transformers checks for a package `kernels`, and imports this file if a script of this folder runs.
if __name__ == "__main__":
    import typer

    from benchmarks.parts.static_kernels import main

    typer.run(main)
