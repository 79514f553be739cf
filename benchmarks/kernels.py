"""Compile the expert kernels for real GPUs on any machine, and print their resources and rooflines."""

# transformers checks for a package `kernels`, and imports this file if a script of this folder runs.
if __name__ == "__main__":
    import typer

    from benchmarks.parts.static_kernels import main

    typer.run(main)
