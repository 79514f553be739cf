"""A local Ray with an application of moepass, as a process of its own: `python ray_driver.py PORT NAME=VALUE...`.

It prints a line when the application answers, and ends when its standard input does.
"""

from __future__ import annotations

import sys

import ray
from ray import serve

from moepass.ray_serve import app


def main() -> None:
    port, *options = sys.argv[1:]
    # More cores than there are: replicas take one each, whatever the machine has.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(app(dict(option.split("=", 1) for option in options)))
    print("running", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
