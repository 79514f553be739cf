"""The clients of a server: `moepass batch` sends requests from a file, `moepass bench` measures a server.

Start reading at `batch_run.py` or `bench_run.py`.

May import the face.
"""
