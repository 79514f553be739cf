"""Options of how a model is run and served: of every command, of the ranks of a server, and of the server itself.

The command line, `moepass.ray_serve` and the message that starts a rank use the same records.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from moepass.models.byte_counts import parse_bytes
from moepass.models.errors import InputError, OptionError
from moepass.models.homes import HOMES, home_named
from moepass.models.limits import (
    AUTO,
    MOST_CONNECTIONS,
    MOST_RANKS,
    MOST_THREADS,
    MOST_TOKENS,
    MOST_WAIT_SECONDS,
    STORED,
    ExpertFormat,
)
from moepass.option_records import Count, option
from moepass.runtime.system.cores import available_cores

_Seconds = Annotated[float, Meta(ge=0.001, le=MOST_WAIT_SECONDS)]


class ComputeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that `score` and `serve` share."""

    home: Annotated[
        str,
        option(
            "Where experts rest; **device** keeps them on the device, and decodes quantised or packed ones layer by "
            "layer.",
            details="See [homes](homes.md).",
            metavar=f"[{'|'.join(HOMES)}]",
        ),
    ] = "host"
    expert_format: Annotated[
        ExpertFormat,
        option(
            "How experts rest and travel: **stored** as in the checkpoint, or packed while they are loaded, "
            "**lossless** or with the bounded errors of **elf**.",
            details="See [packed experts](homes.md#packed-experts).",
        ),
    ] = STORED
    device: Annotated[
        str,
        option(
            "The device that computes: auto, cpu, cuda or cuda:INDEX; **auto** is a GPU if there is one, else the CPU.",
            details="With auto and cuda, ranks take the GPUs in turn.",
            metavar="DEVICE",
        ),
    ] = AUTO
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None, option("The dtype of the weights.", unset="the checkpoint's")
    ] = None
    step_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_TOKENS)] | None,
        option(
            "A step takes waiting requests until it has about this many tokens; "
            "the last request may take it beyond this number.",
            unset="the plan's saturation threshold, or 4096 if there is none",
        ),
    ] = None
    eager: Annotated[
        bool,
        option(
            "Run the model's own code, without capturing or compiling it.",
            details="`--lower eager` captures the model, but does not compile it.",
        ),
    ] = False
    link: Annotated[
        str,
        option(
            "The link that experts are copied over: **real**, or, on a CPU, **emulate:BYTES_PER_S** to emulate a "
            "slower one.",
            metavar="LINK",
        ),
    ] = "real"


class RankOptions(ComputeOptions, frozen=True, kw_only=True):
    """The options of the ranks of a server.

    Constructing one raises OptionError for an unknown home, for byte counts that cannot be parsed, and for options that
    exclude each other.
    """

    ranks: Annotated[Annotated[int, Meta(ge=1, le=MOST_RANKS)], option("The number of processes that compute.")] = 1
    slots: Annotated[
        Count | None,
        option(
            "The number of slots of the ring that experts stream through; each slot holds the experts of one layer.",
            unset="2, or the planner's choice for a memory budget",
        ),
    ] = None
    memory_budget: Annotated[
        str | None,
        option(
            "Device memory that each rank may use for weights, slots, steps and the cache, such as 6GB; the planner "
            "chooses layers whose experts stay there.",
            details="See [memory](#memory).",
            unset="none: all experts are streamed",
            metavar="BYTES",
        ),
    ] = None
    hardware: Annotated[
        str | None,
        option(
            "The machine to plan for: a preset, or the path of a profile.",
            unset="the profile that `moepass calibrate` has stored",
            metavar="NAME",
        ),
    ] = None
    kv_cache: Annotated[
        str | None,
        option(
            "Memory of each rank for the keys and values of prefixes that repeat; **off** disables this cache.",
            unset="a tenth of the memory budget, or of the free memory",
            metavar="BYTES",
        ),
    ] = None
    chunk_tokens: Annotated[
        Count | Literal["auto"] | None,
        option(
            "The maximum number of tokens that the operations between two attention layers process at a time, so that "
            "longer inputs fit into memory. **auto**: as many as fit into the memory budget.",
            details="See [hybrid prefill](options.md#hybrid-prefill).",
            unset="all at once",
            metavar="N",
            expected="a number of tokens from 1 on, or 'auto'",
        ),
    ] = None
    tune_kernels: Annotated[
        bool,
        option(
            "On a GPU, measure which tile sizes make the expert kernels fastest, before the server is ready.",
            details="See [tuned kernels](options.md#tuned-kernels).",
        ),
    ] = False
    lower: Annotated[
        Literal["inductor", "eager"],
        option(
            "How the segments of the captured model run: **inductor** compiles them, **eager** runs their operators "
            "one by one."
        ),
    ] = "inductor"
    experts_compute: Annotated[
        Literal["model", "fp8"],
        option(
            "The arithmetic of experts: in the **model**'s dtype, or in **fp8** on a GPU of compute capability 9.0 or "
            "higher, for checkpoints whose experts are stored as blocks of FP8.",
            details="See [FP8 arithmetic](options.md#fp8-arithmetic).",
        ),
    ] = "model"
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_THREADS)] | None,
        option("CPU threads of each rank.", unset="the cores, divided evenly"),
    ] = None

    def __post_init__(self) -> None:
        try:
            home_named(self.home)
            parse_bytes(self.memory_budget)
            _ = self.cache_bytes
        except InputError as error:
            raise OptionError(str(error), name=error.name, value=error.value, expected=error.expected) from error
        if self.chunk_tokens == AUTO and (self.memory_budget is None or self.home == "device"):
            message = (
                "chunk_tokens is 'auto', but there is no memory budget that chunks could fit into; set memory_budget, "
                "and a home that experts are streamed from, or set chunk_tokens to a number of tokens"
            )
            raise OptionError(message, name="chunk_tokens", value=AUTO)
        self.check_kernels(self.device)

    def check_kernels(self, device: str) -> None:
        """Raise OptionError for options of Triton kernels if experts have none on `device`; "auto" may be a GPU."""
        if device.startswith(("cuda", AUTO)) and not self.eager and self.lower != "eager":
            return
        for name, default in (("tune_kernels", False), ("experts_compute", "model")):
            if (value := getattr(self, name)) != default:
                text = (
                    f"{name} is {value!r}, but with device {device!r}, lower {self.lower!r}"
                    f"{' and eager' if self.eager else ''} experts have no Triton kernels; they have with device cuda "
                    "and lower inductor"
                )
                raise OptionError(text, name=name, value=value, expected=(default,))

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of each rank's prefix cache: 0 for no cache, None for the default size."""
        if self.kv_cache == "off":
            return 0
        nbytes = parse_bytes(self.kv_cache, "kv_cache")
        return None if nbytes is None else int(nbytes)

    @property
    def threads_per_rank(self) -> int:
        """The number of CPU threads that each rank computes with."""
        return self.threads or max(1, available_cores() // self.ranks)


class RankSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message that a rank reads when it starts, as JSON.

    `key` is the secret key of block hashes, in hexadecimal digits; if it is empty, the server draws one. Ranks of a
    spread home rendezvous through the folder `meeting`.
    """

    model: str
    options: RankOptions
    key: str = ""
    meeting: str = ""


class FrontendOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The API key and the limits of the process that answers clients."""

    api_key: Annotated[
        str | None,
        option(
            "The key that clients must send.",
            details="Every route except `/`, `/health`, `/ready` and `/ping` requires it.",
            unset="none",
            metavar="KEY",
        ),
    ] = None
    timeout: Annotated[_Seconds, option("Seconds after which an unanswered request gets 504.", metavar="SECONDS")] = (
        60.0
    )
    queue_seconds: Annotated[
        _Seconds,
        option(
            "The limit on waiting work, in seconds of computation; calls above it are refused with 429.",
            details="The header `Retry-After` says when to try again. A call is one HTTP request, which may contain "
            "several prompts; it is accepted or refused as a whole. An idle server accepts every call that its model "
            "can compute.",
            metavar="SECONDS",
        ),
    ] = 30.0
    queue_bytes: Annotated[
        str,
        option(
            "The limit on the memory for the token ids of all open requests; calls above it are refused with 429.",
            details="The header `Retry-After` says when to try again.",
            metavar="BYTES",
        ),
    ] = "1GB"
    drain: Annotated[
        Annotated[float, Meta(ge=0, le=MOST_WAIT_SECONDS)],
        option("The grace period, in seconds, for open requests after SIGTERM.", metavar="SECONDS"),
    ] = 30.0

    @property
    def open_bytes(self) -> int:
        """`queue_bytes` as a number. Raises InputError if it is not a valid number of bytes."""
        return int(parse_bytes(self.queue_bytes, "queue_bytes") or 0)


class ServerOptions(FrontendOptions, frozen=True, kw_only=True):
    """The options of `moepass serve` that are not about its ranks."""

    host: Annotated[str, option("The address to listen on.", metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)], option("The port to listen on; 0 picks a free one.")] = 8000
    name: Annotated[
        tuple[str, ...],
        option(
            "The model name that clients use; repeat the option for more names.",
            unset="the last part of MODEL",
            metavar="NAME",
        ),
    ] = ()
    max_connections: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)],
        option(
            "The maximum number of open connections, over all clients; further ones are answered with 503.",
            details="The header `Retry-After` says when to try again. Each connection is an open file: if the system "
            "allows fewer, the server prints a warning when it starts.",
        ),
    ] = MOST_CONNECTIONS


def served_names(model: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names by which clients call `model`: `names`, or the last part of its path if `names` is empty."""
    return names or (os.path.basename(os.path.abspath(model)) or model,)
