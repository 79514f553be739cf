"""The command `moepass score`: its options, and the path of JSON lines through an engine in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from moepass.cli.progress import progress_bar
from moepass.cli.record_options import takes_records
from moepass.cli.serve_options import ComputeOptions
from moepass.cli.streams import check_compiler_cache, check_output, open_output
from moepass.clients.batch_lines import limited_lines
from moepass.models import limits
from moepass.models.errors import InputError, MoepassError, OptionError
from moepass.option_records import Count, option
from moepass.runtime.system.garbage import no_garbage_collection

if TYPE_CHECKING:
    from moepass.compilations import Compilation
    from moepass.runtime.serving.offline.encoded_texts import EncodedChunk
    from moepass.runtime.serving.offline.text_scorer import ScoredWindow

# Keys that `score` writes. An input line's key of the same name is written as `input_KEY`.
_ANSWER_KEYS = ("label", "probabilities", "mass")
# The part of the input that is checked before anything is loaded.
_FIRST_LINES, _FIRST_CHARACTERS = 1024, 1 << 20
# Parts of a file that a thread encodes ahead of the computation; a window has at most this many.
_PARTS_AHEAD = 32
# Skipped lines that the report lists with their reasons.
_NAMED_LINES = 1000


class ScoreOptions(ComputeOptions, frozen=True, kw_only=True):
    """The options of `moepass score`."""

    labels: Annotated[
        str | None,
        option(
            "Candidate answers: separated by commas, without trimming spaces; or a JSON list.",
            unset="the template's labels",
            metavar="A,B,...",
        ),
    ] = None
    input: Annotated[str, option("JSON lines to read; - is standard input.", metavar="FILE")] = "-"
    output: Annotated[str, option("JSON lines to write; - is standard output.", metavar="FILE")] = "-"
    template: Annotated[
        str | None,
        option(
            "The template around each text: the checkpoint's chat template, its prompt.json, none, or another file in "
            "the format of prompt.json.",
            unset="chat if there is one, else prompt",
            metavar="[chat|prompt|plain|FILE]",
        ),
    ] = None
    on_error: Annotated[
        Literal["stop", "skip"],
        option("What to do with a line that cannot be scored: stop there, or skip it and list it at the end."),
    ] = "stop"
    stream: Annotated[bool, option("--no-stream is the same as --home device.")] = True
    slots: Annotated[
        int,
        option(
            "The number of slots of the ring that experts stream through; each slot holds the experts of one layer."
        ),
    ] = 2
    batch_size: Annotated[
        Count | None, option("The maximum number of texts in a step.", unset="as many as fill a step")
    ] = None
    lower: Annotated[
        Literal["inductor", "eager"] | None,
        option(
            "Compile even a short input, and how; **eager** is bit-identical to the uncompiled model.",
            unset="inductor if the input is long enough for compiling to pay",
        ),
    ] = None
    threads: Annotated[Count | None, option("CPU threads to compute with.", unset="all cores")] = None


@takes_records
def score(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint folder, or **demo** for the bundled model.")
    ],
    *,
    options: ScoreOptions,
) -> None:
    """Score texts against candidate labels, one JSON object per line.

    Each input line is an object with a **text**. Each output line has **label** (the most probable one),
    **probabilities** (their sum is 1) and **mass** (the model's probability of all labels together). Lines are read,
    scored and written window by window, so files may have any length.

    Other keys of a line, such as an id, are copied to its output. Keys called label, probabilities or mass are copied
    as input_label and so on. If the **label** of an input line is one of the labels, it is compared with the answer,
    and a note at the end says how many agree.
    """
    skips = options.on_error == "skip"
    input_name = "standard input" if options.input == "-" else options.input
    lines = InputLines(read_lines(options.input), input_name, skips=skips)
    lines.read_ahead(_FIRST_LINES, _FIRST_CHARACTERS)
    target = check_output(options.output)
    candidates = parse_labels(options.labels)
    if options.batch_size is not None:
        limits.check_limit("batch_size", options.batch_size, limits.MOST_BATCH_SIZE, "larger batches compute no faster")
    set_threads(options.threads)
    known_bytes = lines.known_bytes(options.input)
    with contextlib.ExitStack() as stack:
        with no_garbage_collection():
            from moepass.models.checkpoint.checkpoint_folders import load_config, resolve_model
            from moepass.runtime.serving.offline.encoded_texts import encoded_chunks, make_writer, read_ahead

            folder = resolve_model(model)
            load_config(folder)  # checks the config before the tokenizer's loader reads it
            writer = make_writer(folder, options.template)
            parts: Iterator[EncodedChunk[InputLine]] = encoded_chunks(writer, lines)
            if os.path.isfile(options.input):  # a thread that reads a pipe could not be stopped
                parts = stack.enter_context(read_ahead(parts, _PARTS_AHEAD))
            check_compiler_cache()
            import torch
            from torch import nn

            from moepass.models.sizes.architecture import DTYPES
            from moepass.runtime.serving.offline.load_scorer import compiling_pays, load_scorer

            def compile_module(module: nn.Module) -> StoredModule:
                return StoredModule(module, {"lower": options.lower or "inductor"}, model)

            dtypes = {short: getattr(torch, name) for name, short in DTYPES.items()}
            compiles = not options.eager and (options.lower is not None or compiling_pays(model, known_bytes))
            recording: contextlib.AbstractContextManager[list[Compilation]] = contextlib.nullcontext([])
            if compiles:  # these imports take a while
                from moepass.compilations import record_compilations
                from moepass.stored_compile import StoredModule

                recording = record_compilations()
            scorer = load_scorer(
                model,
                writer,
                compile_module if compiles else None,
                labels=candidates,
                home=options.home if options.stream else "device",
                dtype=None if options.dtype is None else dtypes[options.dtype],
                batch_size=options.batch_size,
                step_tokens=options.step_tokens,
                slots=options.slots,
                device=options.device,
                link=options.link,
                expert_format=options.expert_format,
            )
            gc.freeze()
        with contextlib.suppress(InputError):  # the error is reported with the line's number when the line is scored
            for warning in scorer.warnings(lines.first) if lines.first else ():
                typer.echo(f"moepass: warning: {warning}", err=True)
        done = written = agreeing = labelled = 0
        with recording as compilations, open_output(options.output, target) as sink, progress_bar("scoring") as shown:
            bar, task = shown
            for window in scorer.windows_of(parts, stops=not skips):
                for line, answer in _answers(window, scorer.labels, lines):
                    gold = line.extra.get("label")
                    if isinstance(gold, str) and gold in scorer.label_numbers:
                        labelled += 1
                        agreeing += gold == answer["label"]
                    sink.write(msgspec.json.encode(answer) + b"\n")
                    written += 1
                sink.flush()
                done += len(window.texts)
                bar.update(task, completed=done, total=lines.count if lines.at_end else None)
            if not written:
                raise InputError(f"no line could be scored; {lines.report()}", name="input", value=options.input)
    for refusal in (refusal for compilation in compilations for refusal in compilation.plan.refusals):
        typer.echo(f"moepass: note: left unchanged: {refusal}", err=True)
    if labelled:
        typer.echo(f"moepass: note: {agreeing} of {labelled} labels agree ({agreeing / labelled:.2%})", err=True)
    if lines.skipped:
        typer.echo(f"moepass: {lines.report()}", err=True)


class InputLines:
    """The lines of the input called `name`, and a record of skipped lines.

    In `source`, None replaces a line beyond the limit. Blank lines are ignored. `first` is the first text, if it was
    read ahead. `count` lines have been read so far. `at_end` is True after the last line was read.
    """

    def __init__(self, source: Iterable[bytes | None], name: str, *, skips: bool) -> None:
        self._source, self._name, self._skips = enumerate(source, 1), name, skips
        self._ahead: list[InputLine] = []
        self.first = ""
        self._lock = threading.Lock()  # lines are read in one thread and scored in another
        self.count = 0
        self.at_end = False
        self.skipped = 0
        self._reasons: list[tuple[int, str]] = []

    def read_ahead(self, lines: int, characters: int) -> None:
        """Read up to `lines` lines, or fewer with `characters` characters together, and keep them for the iteration."""
        read = 0
        for line in self._read():
            self._ahead.append(line)
            read += len(line.text)
            if len(self._ahead) >= lines or read >= characters:
                break
        self.first = self._ahead[0].text if self._ahead else ""

    def known_bytes(self, source: str) -> int | None:
        """Return the length of the input in bytes, or None for a pipe that has not been read to its end."""
        if self.at_end:
            return sum(len(line.text) for line in self._ahead)
        return os.path.getsize(source) if os.path.isfile(source) else None

    def __iter__(self) -> Iterator[InputLine]:
        while self._ahead:
            ahead, self._ahead = self._ahead, []
            yield from ahead
        yield from self._read()

    def _read(self) -> Iterator[InputLine]:
        for number, raw in self._source:
            if raw is not None and not raw.strip():
                continue
            self.count += 1
            try:
                line = _parsed(number, raw, self._name)
            except InputError as error:
                if not self._skips:
                    raise
                self.skip(number, error)
            else:
                yield line
        if not self.count:
            text = f'{self._name} is empty; it must contain one JSON object per line, such as {{"text": "..."}}'
            raise InputError(text, path=self._name)
        self.at_end = True

    def skip(self, number: int, error: MoepassError) -> None:
        """Count the line `number` as skipped because of `error`."""
        with self._lock:
            self.skipped += 1
            if len(self._reasons) < _NAMED_LINES:
                self._reasons.append((number, " ".join(str(error).split())[:500]))

    def report(self) -> str:
        """Return the number of skipped lines, followed by a line with the reason for each."""
        more = self.skipped - len(self._reasons)
        reasons = [reason for _, reason in sorted(self._reasons)] + ([f"and {more} more"] if more else [])
        return "\n  ".join([f"skipped {self.skipped} of {self.count} lines:", *reasons])


def _answers(
    window: ScoredWindow[InputLine], labels: tuple[str, ...], lines: InputLines
) -> Iterator[tuple[InputLine, dict[str, Any]]]:
    from moepass.runtime.serving.offline.load_scorer import seven_digits

    probabilities, masses = seven_digits(window.probabilities).tolist(), seven_digits(window.mass).tolist()
    best = window.probabilities.argmax(1).tolist()
    for line, outcome in zip(window.texts, window.outcomes, strict=True):
        if not isinstance(outcome, int):
            lines.skip(line.number, outcome)
            continue
        extra = {f"input_{key}" if key in _ANSWER_KEYS else key: value for key, value in line.extra.items()}
        chances = dict(zip(labels, probabilities[outcome], strict=True))
        yield line, {"label": labels[best[outcome]], "probabilities": chances, "mass": masses[outcome], **extra}


def parse_labels(text: str | None) -> list[str] | None:
    """Return `a,b` or `["a", "b"]` as a list, and None for None.

    Raises InputError for a malformed JSON list, and OptionError if only some labels start with a space: `a, b` looks
    like `a,b`, but ` b` and `b` are different answers of a model.
    """
    if text is None:
        return None
    if not text.startswith("["):
        labels = text.split(",")
        if len({label.startswith(" ") for label in labels}) > 1:
            plain = ",".join(label.strip() for label in labels)
            problem = f"some of the labels {text!r} start with a space, which is part of a label, and others do not"
            advice = f"use {plain!r}, or a JSON list such as {json.dumps(labels)} if you mean it"
            raise OptionError(f"{problem}; {advice}", name="labels", value=text, expected=plain)
        return labels
    try:
        listed: list[str] = limits.decode_json(text, list[str])
        return listed
    except InputError as error:
        message = f"labels {text!r} are not a JSON list of strings: {error}"
        raise InputError(message, name="labels", value=text) from error


def set_threads(threads: int | None) -> None:
    """Let torch compute with `threads` CPU threads; None keeps its default. Raises TooLargeError for too many."""
    if threads is not None:
        limits.check_limit("threads", threads, limits.MOST_THREADS, "more threads than cores make nothing faster")
        import torch

        torch.set_num_threads(threads)


# ---- Input -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class InputLine:
    """A line of input that can be scored: its number, counted from 1, its text, and its other keys."""

    number: int
    text: str
    extra: dict[str, Any]

    @property
    def name(self) -> str:
        """The line's name in error messages."""
        return f"line {self.number}"


def read_lines(source: str) -> Iterator[bytes | None]:
    """Yield the lines of the file `source`, or of standard input for "-"; a line beyond the limit as None.

    Raises InputError if the input cannot be read.
    """
    try:
        if source == "-":
            yield from limited_lines(sys.stdin.buffer, limits.MOST_LINE_BYTES)
            return
        with open(source, "rb") as file:
            yield from limited_lines(file, limits.MOST_LINE_BYTES)
    except OSError as error:
        text = f"input {source!r} cannot be read: {error.strerror}"
        raise InputError(text, name="input", value=source, path=source) from error


def _parsed(number: int, raw: bytes | None, name: str) -> InputLine:
    where = f"line {number}"

    def refusal(text: str, **fields: Any) -> InputError:
        return InputError(f"{where} of {name}{text}", name=where, path=name, **fields)

    if raw is None:
        text = f"{where} of {name} is longer than {limits.MOST_LINE_BYTES} bytes, the limit; split it"
        most = limits.MOST_LINE_BYTES
        raise limits.TooLargeError(text, name=where, value=most + 1, expected=most, path=name)
    try:
        record = limits.decode_json(raw)
    except InputError as error:
        raise refusal(f" is not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise refusal(f' is {_kind(record)}; it must be an object such as {{"text": "..."}}')
    if "text" not in record:
        keys = ", ".join(repr(key) for key in record) or "none"
        raise refusal(f' has no "text"; its keys are {keys}', expected="text")
    text = record.pop("text")
    if not isinstance(text, str):
        raise refusal(f': "text" is {_kind(text)}; it must be a string', value=text, expected="a string")
    if not text.strip():
        raise refusal(': "text" is empty', value=text)
    return InputLine(number, text, record)


def _kind(value: object) -> str:
    names: dict[type[Any], str] = {
        dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null",
    }  # fmt: skip
    return names.get(type(value), "a number")
