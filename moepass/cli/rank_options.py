"""What the server tells its ranks when it starts them: one JSON object on standard input.

And the checks of single options that the command line and Ray share.
"""

from __future__ import annotations

import msgspec

from moepass.models.errors import OptionError
from moepass.models.limits import AUTO


class RankOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a rank serves a model.

    home          where experts rest; `device` keeps them where the model computes
    cache_bytes   for prefix blocks; 0: no cache, None: a part of the memory that is free
    chunk_tokens  what treats every token alone runs at most so many tokens at a time; None: all of a step, "auto": as
                  many as fit into the memory budget
    tune_kernels  before it is ready: those of experts, on a GPU
    key           of the hashes of blocks, in hexadecimal digits
    meeting       a folder in which ranks of a home that is spread over them meet
    """

    model: str
    ranks: int
    home: str
    device: str
    lower: str
    compiled: bool
    link: str
    key: str
    meeting: str
    threads: int | None = None
    dtype: str | None = None
    slots: int | None = None
    memory_budget: str | None = None
    hardware: str | None = None
    cache_bytes: int | None = None
    step_tokens: int | None = None
    chunk_tokens: int | str | None = None
    tune_kernels: bool = False


def parse_chunk_tokens(given: int | str | None, home: str, memory_budget: str | None) -> int | str | None:
    """`given` as RankOptions.chunk_tokens. Raises OptionError."""
    if given == AUTO:
        if memory_budget is None or home == "device":
            raise OptionError(
                "chunk_tokens is 'auto', but there is no memory budget that chunks could fit into; give memory_budget, "
                "and a home that experts are streamed from, or a number of tokens",
                name="chunk_tokens",
                value=given,
            )
        return AUTO
    if given is None:
        return None
    try:
        number = int(given)
    except ValueError:
        number = 0
    if number < 1:
        raise OptionError.wrong("chunk_tokens", given, "a number of tokens from 1 on, or 'auto'")
    return number


def check_kernel_tuning(device: str, lower: str, eager: bool) -> None:
    """Raise OptionError where experts have no kernels that could be tuned."""
    if not device.startswith("cuda") or eager or lower == "eager":
        raise OptionError(
            f"tune_kernels is given, but with device {device!r}, lower {lower!r}{' and eager' if eager else ''} "
            "experts have no Triton kernels; they have with device cuda and lower inductor",
            name="tune_kernels",
            value=True,
            expected=(False,),
        )
