"""Run a local Ray with an application of moepass in a separate process.

    python -m tests.helpers.serving.ray_driver PORT NAME=VALUE...

prints a line when the application answers, and ends when its standard input is closed.
"""

from __future__ import annotations

import sys

import ray
from ray import serve

from moepass.ray_serve import app


def main() -> None:
    port, *options = sys.argv[1:]
    # More cores than the machine may have, because each replica takes one.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(app(dict(option.split("=", 1) for option in options)))
    print("running", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
