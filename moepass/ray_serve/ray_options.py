"""What an application of Ray Serve is told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from moepass.cli.rank_options import RankOptions, check_kernel_tuning, parse_chunk_tokens
from moepass.models.byte_counts import parse_bytes
from moepass.models.errors import OptionError
from moepass.models.homes import home_named
from moepass.models.limits import MOST_RANKS, MOST_THREADS


class RayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As the options of `moepass serve`, and beside them:

    replicas    each with `ranks` processes and a frontend of its own
    frontends   processes that take HTTP requests, make tokens of them and route them; each sees its own requests alone
    num_cpus    that Ray keeps free for a replica; without it: ranks times threads
    num_gpus    the same; without it: one for each rank that computes on one
    """

    model: str
    replicas: int = 1
    frontends: int = 1
    num_cpus: float | None = None
    num_gpus: float | None = None
    name: str | None = None
    api_key: str | None = None
    timeout: float = 60.0
    queue_seconds: float = 30.0
    queue_bytes: str = "1GB"
    drain: float = 30.0
    ranks: int = 1
    home: str = "host"
    device: str = "cpu"
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    memory_budget: str | None = None
    slots: int | None = None
    hardware: str | None = None
    kv_cache: str | None = None
    step_tokens: int | None = None
    chunk_tokens: int | str | None = None
    tune_kernels: bool = False
    lower: Literal["inductor", "eager"] = "inductor"
    eager: bool = False
    link: str = "real"
    threads: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name or os.path.basename(os.path.abspath(self.model)),)

    @property
    def open_bytes(self) -> int:
        """Raises InputError."""
        return int(parse_bytes(self.queue_bytes, "queue_bytes") or 0)

    @property
    def actor_resources(self) -> dict[str, float]:
        """What a replica takes of the cluster."""
        cpus = self.num_cpus if self.num_cpus is not None else self.ranks * self.threads
        on_gpus = self.ranks if self.device.startswith("cuda") else 0
        return {"num_cpus": cpus, "num_gpus": self.num_gpus if self.num_gpus is not None else on_gpus}

    def rank_options(self, key: bytes) -> RankOptions:
        """What the ranks of all replicas are told. Raises InputError and OptionError."""
        cache_bytes = 0 if self.kv_cache == "off" else parse_bytes(self.kv_cache, "kv_cache")
        home = home_named(self.home).name
        if self.tune_kernels:
            check_kernel_tuning(self.device, self.lower, self.eager)
        return RankOptions(
            model=self.model,
            ranks=self.ranks,
            home=home,
            device=self.device,
            lower=self.lower,
            compiled=not self.eager,
            link=self.link,
            key=key.hex(),
            meeting="",
            threads=self.threads,
            dtype=self.dtype,
            slots=self.slots,
            memory_budget=self.memory_budget,
            hardware=self.hardware,
            cache_bytes=None if cache_bytes is None else int(cache_bytes),
            step_tokens=self.step_tokens,
            chunk_tokens=parse_chunk_tokens(self.chunk_tokens, home, self.memory_budget),
            tune_kernels=self.tune_kernels,
        )


def parse_options(given: Mapping[str, Any]) -> RayOptions:
    """Options as values or as text, as a command line has them. Raises OptionError."""
    try:
        options = msgspec.convert(dict(given), RayOptions, strict=False)
    except msgspec.ValidationError as error:
        raise OptionError(f"an option of the application is wrong: {error}", name="options") from error
    for name, value, most in (
        ("replicas", options.replicas, MOST_RANKS),
        ("frontends", options.frontends, MOST_RANKS),
        ("ranks", options.ranks, MOST_RANKS),
        ("threads", options.threads, MOST_THREADS),
    ):
        if not 1 <= value <= most:
            raise OptionError.wrong(name, value, f"1 to {most}")
    return options
