"""What the server tells its ranks when it starts them: one JSON object on standard input."""

from __future__ import annotations

import msgspec


class RankOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a rank serves a model.

    home          where experts rest; `device` keeps them where the model computes
    cache_bytes   for prefix blocks; 0: no cache, None: a part of the memory that is free
    chunk_tokens  what treats every token alone runs at most so many tokens at a time; None: all of a step
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
    chunk_tokens: int | None = None
    tune_kernels: bool = False
