"""Options of an application of Ray Serve: its own, and the options of a server's frontend and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from moepass.cli.serve_options import FrontendOptions, RankOptions, RankSetup, served_names
from moepass.models.limits import MOST_RANKS
from moepass.option_records import check_names, option, read_options

_ProcessCount = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
# Several replicas may share a machine, so its cores are not divided among the ranks of one of them.
# Ray gives a replica only the GPUs that it reserves.
_DEFAULTS = {"threads": 1, "device": "cpu"}


class ApplicationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that `moepass serve` does not have, and the model."""

    model: Annotated[str, option("A checkpoint folder, or `demo`.", expected="a checkpoint folder, or demo")]
    name: Annotated[
        str | None, option("The name by which clients call the model.", unset="the last part of `model`")
    ] = None
    replicas: Annotated[
        _ProcessCount,
        option(
            "The number of replicas. Each has `ranks` processes that compute, and one that distributes work to them."
        ),
    ] = 1
    frontends: Annotated[
        _ProcessCount,
        option(
            "The number of processes that receive HTTP requests, tokenise them and choose a replica for each. Each "
            "frontend knows only its own requests."
        ),
    ] = 1
    num_cpus: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        option("CPUs that Ray reserves for a replica.", unset="`ranks` times `threads`"),
    ] = None
    num_gpus: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        option("GPUs that Ray reserves for a replica.", unset="one for each rank, if `device` is cuda"),
    ] = None


class RayOptions(msgspec.Struct, frozen=True):
    """All options of an application."""

    application: ApplicationOptions
    frontend: FrontendOptions
    rank: RankOptions

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which clients call the model."""
        return served_names(self.application.model, (self.application.name,) if self.application.name else ())

    @property
    def actor_resources(self) -> dict[str, float]:
        """The resources that Ray reserves for a replica, as `ray_actor_options`."""
        cpus, gpus = self.application.num_cpus, self.application.num_gpus
        if cpus is None:
            cpus = self.rank.ranks * self.rank.threads_per_rank
        if gpus is None:
            gpus = self.rank.ranks if self.rank.device.startswith("cuda") else 0
        return {"num_cpus": cpus, "num_gpus": gpus}

    def rank_setup(self, key: bytes) -> RankSetup:
        """Return the message that starts the ranks of every replica. `key` is the key of block hashes."""
        return RankSetup(self.application.model, self.rank, key.hex())


def parse_options(options: Mapping[str, Any]) -> RayOptions:
    """Return the options of an application, converted from text where needed.

    Raises OptionError for an unknown or invalid option, and InputError if `queue_bytes` is not a number of bytes.
    """
    check_names(options, (ApplicationOptions, FrontendOptions, RankOptions))
    values = {**_DEFAULTS, **options}
    parsed = RayOptions(
        read_options(ApplicationOptions, values, strict=False),
        read_options(FrontendOptions, values, strict=False),
        read_options(RankOptions, values, strict=False),
    )
    _ = parsed.frontend.open_bytes
    return parsed
