"""Replicas of a server as an application of Ray Serve, with this server's router in front of them.

    from ray import serve
    from moepass.ray_serve import build_app

    serve.run(build_app("./checkpoint", replicas=2))

or `serve run moepass.ray_serve:app model=./checkpoint replicas=2`. Ray is in the extra `moepass[ray]`, and is imported
when an application is built. Start reading at `application.py`.

May import cli, the face.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moepass.models.errors import OptionError


def build_app(model: str, **options: Any) -> Any:
    """Return the application for `ray.serve.run`, which answers every route of `moepass serve MODEL`.

    The options are the fields of `ApplicationOptions`, `FrontendOptions` and `RankOptions`. Raises OptionError for
    wrong options, and if Ray Serve is not installed.
    """
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        text = f"Ray Serve is not installed ({error}); install it with: pip install 'moepass[ray]'"
        raise OptionError(text, name="ray") from error
    from moepass.ray_serve.application import application

    return application({"model": model, **options})


def app(options: Mapping[str, str]) -> Any:
    """Return the application for `serve run moepass.ray_serve:app model=MODEL ...`; see `build_app`."""
    if "model" not in options:
        raise OptionError("option model is missing; add model=./checkpoint, or model=demo", name="model")
    return build_app(**options)
