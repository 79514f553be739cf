"""Workloads of `moepass bench`: its options, and the requests, as a pure function of a few numbers and a seed.

Each request is a prefix followed by its own text. Lengths are in tokens if the route takes token ids (completions,
score), and in words, which are one token or more, if it takes text (decisions, rerank).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from moepass.models.errors import OptionError, one_of
from moepass.models.limits import MOST_BENCH_REQUESTS
from moepass.option_records import option

# Token ids that decoder-only models do not use as control tokens, and words that are one token in most vocabularies.
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
_Positive = Annotated[float, Meta(ge=0.001)]


@dataclasses.dataclass(frozen=True)
class WorkloadShape:
    """The number, lengths and shared prefixes of the requests. Ranges include both ends.

    Attributes:
        prefixes: the number of prefixes, which the requests share evenly; 0 gives every request its own.
        own_length: the range of the length of the text after the prefix, for each item.
        items: the number of items in each request: questions about an input, prompts, items to score, or documents.
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
                text = (
                    f"{name} is {low}-{high}; it must be LOW-HIGH with LOW at least {least}, so that {why} can differ"
                )
                raise OptionError(text, name=name, value=(low, high), expected=least)


@dataclasses.dataclass(frozen=True)
class _RouteForm:
    """The format of a route's requests, which contain token ids or text.

    `body` makes the JSON body from the prefix, which some routes need, the items' own texts, and the shape.
    """

    path: str
    takes_ids: bool
    needs_prefix: bool
    body: Callable[[list[Any], list[list[Any]], WorkloadShape], dict[str, Any]]


class BenchRequest(msgspec.Struct, frozen=True):
    """A request that is ready to be sent. `prefix` is the number of its shared prefix, or -1."""

    route: str
    body: bytes
    prefix: int = -1


def requests_of(shape: WorkloadShape, model: str) -> Iterator[BenchRequest]:
    """Yield the requests of `shape`, all of them different. The same shape and model yield the same requests."""
    route = ROUTES[shape.route]
    units: Sequence[Any] = _IDS if route.takes_ids else _WORDS
    groups = shape.prefixes or shape.requests
    order = [number % groups for number in range(shape.requests)]
    random.Random(f"{shape.seed} order").shuffle(order)
    prefixes: dict[int, list[Any]] = {}
    for number, group in enumerate(order):
        prefix = prefixes.get(group)
        if prefix is None:
            prefix = _random_text(f"{shape.seed} prefix {group}", shape.prefix_length, units, group, groups)
            if shape.prefixes:
                prefixes[group] = prefix
        texts = [
            _random_text(f"{shape.seed} own {item}", shape.own_length, units, item, shape.requests * shape.items)
            for item in range(number * shape.items, (number + 1) * shape.items)
        ]
        body = {"model": model, **route.body(prefix, texts, shape)}
        yield BenchRequest(route.path, msgspec.json.encode(body), group if shape.prefixes else -1)


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return the arrival times of `count` independent requests in seconds, on average `rate` of them per second."""
    generator = random.Random(f"{seed} arrivals")
    return list(itertools.accumulate(generator.expovariate(rate) for _ in range(count)))


def _random_text(seed: str, length: Range, units: Sequence[Any], number: int, count: int) -> list[Any]:
    """Return random units after `number` in base len(units), so that all `count` texts are different."""
    generator = random.Random(seed)
    size = generator.randint(*length)
    prefix = []
    for _ in range(min(size, _digits(count, len(units)))):
        number, digit = divmod(number, len(units))
        prefix.append(units[digit])
    return prefix + generator.choices(units, k=size - len(prefix))


def _digits(count: int, base: int) -> int:
    """Return the number of digits of the numbers below `count`."""
    return next(digits for digits in itertools.count(1) if base**digits >= count)


def _decisions(prefix: list[Any], texts: list[list[Any]], shape: WorkloadShape) -> dict[str, Any]:
    choices = [{"value": label} for label in shape.labels]
    questions = [
        {"type": "choice", "instructions": f"Question {number}: which fits?", "choices": choices}
        for number in range(1, len(texts) + 1)
    ]
    return {"input": " ".join(prefix + texts[0]), "questions": questions}


def _completions(prefix: list[Any], texts: list[list[Any]], shape: WorkloadShape) -> dict[str, Any]:
    prompts = [prefix + text for text in texts]
    return {"prompt": prompts[0] if len(prompts) == 1 else prompts, "max_tokens": 1, "temperature": 0}


def _score(prefix: list[Any], texts: list[list[Any]], shape: WorkloadShape) -> dict[str, Any]:
    return {"query": prefix, "items": texts, "label_token_ids": [_IDS[0], _IDS[1]], "apply_softmax": True}


def _rerank(prefix: list[Any], texts: list[list[Any]], shape: WorkloadShape) -> dict[str, Any]:
    return {"query": " ".join(prefix), "documents": [" ".join(text) for text in texts]}


ROUTES = {
    "decisions": _RouteForm("/v1/decisions", False, False, _decisions),
    "completions": _RouteForm("/v1/completions", True, False, _completions),
    "score": _RouteForm("/v1/score", True, True, _score),
    "rerank": _RouteForm("/rerank", False, True, _rerank),
}

# [Empirical] The lengths of the named data sets, and of the two workloads that compare this server with others. The
# numbers of requests are scaled down: QuALITY to a tenth, ArXiv to a fiftieth, the others to a hundredth. How many
# requests share a prefix is estimated from how the data sets are made.
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


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `moepass bench`."""

    workload: Annotated[
        str | None,
        option(f"Lengths and shared prefixes of a data set: {', '.join(PRESETS)}.", unset="none", metavar="NAME"),
    ] = None
    file: Annotated[
        str | None,
        option("A file of requests in the format of **moepass batch**, instead of generated ones.", metavar="FILE"),
    ] = None
    route: Annotated[str, option("The route to call.", metavar=f"[{'|'.join(ROUTES)}]")] = "decisions"
    requests: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_BENCH_REQUESTS)] | None,
        option("The number of requests to send.", unset="256; all lines of --file"),
    ] = None
    rate: Annotated[
        _Positive | None,
        option("Send N requests per second at random times, however slow the answers are.", unset="none"),
    ] = None
    concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 16)],
        option("Without --rate: the number of requests that are open at the same time."),
    ] = 32
    prefixes: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option("The number of prefixes that requests share; 0: every request has its own.", unset="0"),
    ] = None
    prefix_length: Annotated[
        str | None,
        option("The length of a prefix in tokens, or in words if the route takes text.", unset="0", metavar="N[-M]"),
    ] = None
    own_length: Annotated[
        str | None, option("The length of the text after the prefix.", unset="64", metavar="N[-M]")
    ] = None
    items: Annotated[
        Annotated[int, Meta(ge=1, le=4096)], option("Questions, prompts, items or documents in a request.")
    ] = 1
    labels: Annotated[str, option("The choices of decisions.", metavar="A,B,...")] = "yes,no"
    seed: Annotated[int, option("The same seed makes the same requests.")] = 0
    goodput: Annotated[
        _Positive | None,
        option("Count the requests that were answered within MS milliseconds.", unset="none", metavar="MS"),
    ] = None
    warmup: Annotated[
        Annotated[int, Meta(ge=0, le=MOST_BENCH_REQUESTS)], option("Requests to send first, which are not counted.")
    ] = 8
    model: Annotated[
        str | None, option("The model to ask for.", unset="the model that the server has", metavar="NAME")
    ] = None
    api_key: Annotated[str | None, option("The API key of the server.", metavar="KEY")] = None
    timeout: Annotated[
        _Positive, option("The time after which an unanswered request is an error.", metavar="SECONDS")
    ] = 600.0
    json: Annotated[bool, option("Print the report as JSON.")] = False

    @property
    def name(self) -> str:
        """The name of the workload in the report."""
        return f"{self.workload or 'generated'}, {self.route}" if self.file is None else self.file

    def shape(self, labels: Sequence[str]) -> WorkloadShape:
        """Return the number, lengths and shared prefixes of the requests.

        Raises OptionError for values that are wrong or exclude each other.
        """
        if self.file is not None and self.workload is not None:
            raise OptionError("--file already contains the requests; leave out --workload", name="workload")
        if self.workload is not None and self.workload not in PRESETS:
            raise OptionError.wrong("workload", self.workload, f"one of {', '.join(PRESETS)}")
        preset = PRESETS[self.workload] if self.workload is not None else WorkloadShape()
        lengths: dict[str, Any] = {
            "requests": self.requests if self.file is None or self.requests is not None else MOST_BENCH_REQUESTS,
            "prefixes": self.prefixes,
            "prefix_length": _parse_range("prefix_length", self.prefix_length),
            "own_length": _parse_range("own_length", self.own_length),
        }
        lengths = {name: value for name, value in lengths.items() if value is not None}
        return dataclasses.replace(
            preset, route=self.route, items=self.items, labels=tuple(labels), seed=self.seed, **lengths
        )


def _parse_range(name: str, text: str | None) -> tuple[int, int] | None:
    """Return `5` as (5, 5) and `5-9` as (5, 9)."""
    if text is None:
        return None
    low, dash, high = text.partition("-")
    try:
        return int(low), int(high if dash else low)
    except ValueError as error:
        raise OptionError.wrong(name, text, "a number such as 64, or a range such as 50-500") from error
