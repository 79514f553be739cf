"""Replicas of a server as an application of Ray Serve, with this server's router before them. May import cli, the face.

    from ray import serve
    from moepass.ray_serve import build_app

    serve.run(build_app("./checkpoint", replicas=2))

or `serve run moepass.ray_serve:app model=./checkpoint replicas=2`. Ray comes with the extra `moepass[ray]`; it is
imported when an application is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moepass.models.errors import OptionError


def build_app(model: str, **options: Any) -> Any:
    """The application that answers every route of `moepass serve MODEL`, for `ray.serve.run`.

    `options` are those of `RayOptions`. Raises OptionError for wrong options, and where Ray Serve is not installed.
    """
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"Ray Serve is not installed ({error}); install it with: pip install 'moepass[ray]'", name="ray"
        ) from error
    from moepass.ray_serve.application import application

    return application({"model": model, **options})


def app(options: Mapping[str, str]) -> Any:
    """As `build_app`, for `serve run moepass.ray_serve:app model=MODEL ...`."""
    if "model" not in options:
        raise OptionError("no model is given; add model=./checkpoint, or model=demo", name="model")
    return build_app(**options)
