"""Workloads: the requests to measure a server with, as a pure function of a few numbers and a seed.

Every request is a prefix and something of its own. Lengths are in tokens where the route takes token ids (completions,
score), and in words, which are one token or more, where it takes text (decisions, rerank).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from moepass.models.errors import OptionError, one_of

# Ids that decoder-only models do not use for control tokens, and words of one token in most of their vocabularies.
_IDS = range(32, 160)
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name team minute idea body back parent face level office
door
"""
_WORDS = _TEXT.split()

Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class WorkloadShape:
    """What requests look like; ranges are inclusive.

    prefixes        so many are shared by the requests, each by as many of them; 0: every request has its own
    prefix_length   of each prefix
    own_length      of what follows it, in each item
    items           questions about an input, prompts, or items and documents beside a query
    """

    route: str = "decisions"
    requests: int = 256
    prefixes: int = 0
    prefix_length: Range = (0, 0)
    own_length: Range = (64, 64)
    items: int = 1
    labels: tuple[str, ...] = ("yes", "no")
    seed: int = 0

    def __post_init__(self) -> None:
        if self.route not in ROUTES:
            raise OptionError.wrong("route", self.route, f"one of {one_of(ROUTES)}")
        for name, least in (("requests", 1), ("prefixes", 0), ("items", 1)):
            if getattr(self, name) < least:
                raise OptionError.wrong(name, getattr(self, name), f"{least} or more")
        units = len(_IDS if ROUTES[self.route].takes_ids else _WORDS)
        groups = self.prefixes or self.requests
        needs_prefix = int(ROUTES[self.route].needs_prefix)
        least_prefix = max(needs_prefix, _digits(self.prefixes, units)) if self.prefixes else needs_prefix
        for name, (low, high), least, why in (
            ("prefix_length", self.prefix_length, least_prefix, f"{groups} prefixes"),
            ("own_length", self.own_length, _digits(self.requests * self.items, units), "requests"),
        ):
            if not least <= low <= high:
                raise OptionError(
                    f"{name} is {low}-{high}; it must be LOW-HIGH with LOW at least {least}, so that {why} can differ",
                    name=name,
                    value=(low, high),
                    expected=least,
                )


@dataclasses.dataclass(frozen=True)
class _Route:
    """How one route is asked: its path, its body from a prefix, items, and the shape."""

    path: str
    takes_ids: bool
    needs_prefix: bool
    body: Callable[[list[Any], list[list[Any]], WorkloadShape], dict[str, Any]]


class BenchRequest(msgspec.Struct, frozen=True):
    """A request, ready to be sent. Those of one `prefix` share it; it is -1 where that is not known."""

    route: str
    body: bytes
    prefix: int = -1


def requests_of(shape: WorkloadShape, model: str) -> Iterator[BenchRequest]:
    """The requests of `shape`, all of them different; the same for the same shape and model."""
    route = ROUTES[shape.route]
    units: Sequence[Any] = _IDS if route.takes_ids else _WORDS
    groups = shape.prefixes or shape.requests
    order = [number % groups for number in range(shape.requests)]
    random.Random(f"{shape.seed} order").shuffle(order)
    prefixes: dict[int, list[Any]] = {}
    for number, group in enumerate(order):
        prefix = prefixes.get(group)
        if prefix is None:
            prefix = _part(f"{shape.seed} prefix {group}", shape.prefix_length, units, group, groups)
            if shape.prefixes:
                prefixes[group] = prefix
        parts = [
            _part(f"{shape.seed} own {own}", shape.own_length, units, own, shape.requests * shape.items)
            for own in range(number * shape.items, (number + 1) * shape.items)
        ]
        body = {"model": model, **route.body(prefix, parts, shape)}
        yield BenchRequest(route.path, msgspec.json.encode(body), group if shape.prefixes else -1)


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` of them in a second, independently of each other."""
    chance = random.Random(f"{seed} arrivals")
    times, now = [], 0.0
    for _ in range(count):
        now += chance.expovariate(rate)
        times.append(now)
    return times


def _part(seed: str, length: Range, units: Sequence[Any], number: int, count: int) -> list[Any]:
    """Random units, the first of which spell `number`, so that no two parts of `count` are the same."""
    chance = random.Random(seed)
    size = chance.randint(*length)
    spelt = []
    for _ in range(min(size, _digits(count, len(units)))):
        number, digit = divmod(number, len(units))
        spelt.append(units[digit])
    return spelt + chance.choices(units, k=size - len(spelt))


def _digits(count: int, base: int) -> int:
    """Digits that numbers below `count` have."""
    digits = 1
    while base**digits < count:
        digits += 1
    return digits


def _decisions(prefix: list[Any], parts: list[list[Any]], shape: WorkloadShape) -> dict[str, Any]:
    choices = [{"value": label} for label in shape.labels]
    questions = [
        {"type": "choice", "instructions": f"Question {number}: which fits?", "choices": choices}
        for number in range(1, len(parts) + 1)
    ]
    return {"input": _text(prefix + parts[0]), "questions": questions}


def _completions(prefix: list[Any], parts: list[list[Any]], shape: WorkloadShape) -> dict[str, Any]:
    prompts = [prefix + part for part in parts]
    return {"prompt": prompts[0] if len(prompts) == 1 else prompts, "max_tokens": 1, "temperature": 0}


def _score(prefix: list[Any], parts: list[list[Any]], shape: WorkloadShape) -> dict[str, Any]:
    return {"query": prefix, "items": parts, "label_token_ids": [_IDS[0], _IDS[1]], "apply_softmax": True}


def _rerank(prefix: list[Any], parts: list[list[Any]], shape: WorkloadShape) -> dict[str, Any]:
    return {"query": _text(prefix), "documents": [_text(part) for part in parts]}


def _text(words: list[str]) -> str:
    return " ".join(words)


ROUTES = {
    "decisions": _Route("/v1/decisions", False, False, _decisions),
    "completions": _Route("/v1/completions", True, False, _completions),
    "score": _Route("/v1/score", True, True, _score),
    "rerank": _Route("/rerank", False, True, _rerank),
}

# Lengths are those of the named data sets, and of the two workloads that serving is compared with other servers on.
# Numbers of requests are scaled down, QuALITY's and ArXiv's to a tenth and a fiftieth, the others to a hundredth; how
# many share a prefix is a guess from how the data sets are made. [Empirical]
PRESETS = {
    "shared-profiles": WorkloadShape(requests=256, prefixes=4, prefix_length=(512, 512), own_length=(64, 64)),
    "distinct": WorkloadShape(requests=64, own_length=(512, 512)),
    "moral-stories": WorkloadShape(requests=240, prefixes=20, prefix_length=(80, 80), own_length=(20, 120)),
    "mmlu": WorkloadShape(requests=240, own_length=(50, 500)),
    "boolq": WorkloadShape(requests=120, own_length=(200, 600)),
    "imdb": WorkloadShape(requests=120, own_length=(300, 2000)),
    "quality": WorkloadShape(requests=120, prefixes=6, prefix_length=(3900, 11900), own_length=(50, 100)),
    "arxiv": WorkloadShape(requests=12, prefixes=4, prefix_length=(5000, 100_000), own_length=(1000, 28_000)),
}
