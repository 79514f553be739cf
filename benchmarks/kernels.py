"""The expert kernels: what compilers for real GPUs make of them, on any machine, without a GPU.

    python -m benchmarks.kernels --static

Everything is in `parts/static_kernels.py`.
"""

# transformers looks whether a package `kernels` is there, and finds and imports this file, if scripts beside it run.
if __name__ == "__main__":
    import typer

    from benchmarks.parts.static_kernels import main

    typer.run(main)
