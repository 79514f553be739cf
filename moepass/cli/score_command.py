"""`moepass score`: its options, and lines of JSON on their way through the engine of this process."""

from __future__ import annotations

import contextlib
import enum
import gc
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from moepass.cli.arguments import LoweringName, ServedDtype, parse_labels, set_threads
from moepass.cli.input_lines import BadLine, Line, read_lines
from moepass.cli.progress import no_garbage_collection, note_refusals, progress_bar
from moepass.cli.streams import check_compiler_cache, check_output, open_output
from moepass.models.errors import InputError, MoepassError
from moepass.models.homes import HOMES
from moepass.models.limits import MOST_BATCH_SIZE, MOST_TOKENS, check_limit

if TYPE_CHECKING:
    from moepass.compilations import Compilation
    from moepass.runtime.serving.offline.encoded_texts import EncodedPart
    from moepass.runtime.serving.offline.text_scorer import ScoredWindow

# What `score` writes itself; where an input line has a key of that name, it comes back as `input_KEY`.
_ANSWER_KEYS = ("label", "probabilities", "mass")
# The beginning of the input is checked before anything is loaded.
_FIRST_LINES, _FIRST_CHARACTERS = 1024, 1 << 20
# Parts of a file that are encoded while the model is loaded, or computes; as many as a window has at most.
_PARTS_AHEAD = 32
# Skipped lines that the report names; of more it says how many there are.
_NAMED_LINES = 1000


class _OnError(enum.StrEnum):
    stop = "stop"
    skip = "skip"


def score(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint folder, or **demo** for the embedded one.")
    ],
    labels: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Candidate answers: separated by commas, blanks count; or a JSON list.",
            show_default="those of the template",
        ),
    ] = None,
    input: Annotated[str, typer.Option(metavar="FILE", help="JSON lines to read; - is standard input.")] = "-",
    output: Annotated[str, typer.Option(metavar="FILE", help="JSON lines to write; - is standard output.")] = "-",
    template: Annotated[
        str | None,
        typer.Option(
            metavar="[chat|prompt|plain|FILE]",
            help="How texts are asked: by the checkpoint's chat template, by its prompt.json, as they are, or by "
            "another prompt.json.",
            show_default="chat if there is one, else prompt",
        ),
    ] = None,
    on_error: Annotated[
        _OnError, typer.Option(help="At a line that cannot be scored: stop, or skip it and report that at the end.")
    ] = _OnError.stop,
    home: Annotated[
        str,
        typer.Option(metavar=f"[{'|'.join(HOMES)}]", help="Where experts rest; **device** streams none."),
    ] = "host",
    stream: Annotated[bool, typer.Option(help="--no-stream is --home device.")] = True,
    dtype: Annotated[
        ServedDtype | None, typer.Option(help="Of the weights.", show_default="that of the checkpoint")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Texts that run together, at most.", show_default="as many as fill a step"
        ),
    ] = None,
    step_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_TOKENS,
            metavar="N",
            help="A step is full from so many tokens on.",
            show_default="the plan's saturation threshold",
        ),
    ] = None,
    lower: Annotated[
        LoweringName | None,
        typer.Option(
            help="Compile, and how; eager is bit-identical to the uncompiled model.",
            show_default="inductor where the input is so long that compiling pays",
        ),
    ] = None,
    slots: Annotated[
        int,
        typer.Option(metavar="N", help="Slots of the ring that the experts stream through; each holds one layer's."),
    ] = 2,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Where to compute: cpu, cuda or cuda:INDEX.")
    ] = "cpu",
    link: Annotated[
        str,
        typer.Option("--link", metavar="LINK", help="real, or emulate:BYTES_PER_S to see how a slower link would do."),
    ] = "real",
    eager: Annotated[bool, typer.Option("--eager", help="Do not compile at all.")] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="CPU threads to compute with.", show_default="all cores"),
    ] = None,
) -> None:
    """Score texts against candidate labels, one JSON object per line.

    Each line in is an object with a **text**. Each line out has **label** (the most probable one), **probabilities**
    (they sum to 1) and **mass** (what the model gives to all labels together). Lines are read, scored and written
    window by window, so that files may have any length.

    Further keys of a line, such as an id, come back with it. Those called label, probabilities or mass come back as
    input_label and so on. Where a line's **label** is one of the labels, it is compared with the answer, and the end
    says how many agree.
    """
    lines = _Lines(read_lines(input), skips=on_error is _OnError.skip)
    lines.read_ahead(_FIRST_LINES, _FIRST_CHARACTERS)
    target = check_output(output)
    candidates = parse_labels(labels)
    if batch_size is not None:
        check_limit("batch_size", batch_size, MOST_BATCH_SIZE, "no batch of more rows computes faster")
    set_threads(threads)
    known_bytes = lines.known_bytes(input)
    with contextlib.ExitStack() as stack:
        with no_garbage_collection():
            from moepass.models.checkpoint.checkpoint_folders import load_config, resolve_model
            from moepass.runtime.serving.offline.encoded_texts import encoded_parts, read_ahead
            from moepass.runtime.serving.offline.make_writer import make_writer

            folder = resolve_model(model)
            load_config(folder)  # its checks come before the tokenizer's loader reads it too
            writer = make_writer(folder, template)
            parts: Iterator[EncodedPart[Line]] = encoded_parts(writer, lines)
            if os.path.isfile(input):  # what waits for others, as a pipe does, cannot be left at any time
                parts = stack.enter_context(read_ahead(parts, _PARTS_AHEAD))
            check_compiler_cache()
            import torch
            from torch import nn

            from moepass.models.sizes.architecture import DTYPES
            from moepass.runtime.serving.offline.load_scorer import ScorerOptions, compiling_pays, load_scorer

            def compile_module(module: nn.Module) -> StoredModule:
                return StoredModule(module, {"lower": "inductor" if lower is None else lower.value}, model)

            dtypes = {short: getattr(torch, name) for name, short in DTYPES.items()}
            options = ScorerOptions(
                model=model,
                labels=candidates,
                template=template,
                home=home if stream else "device",
                dtype=None if dtype is None else dtypes[dtype.value],
                batch_size=batch_size,
                step_tokens=step_tokens,
                slots=slots,
                device=device,
                link=link,
            )
            compiles = not eager and (lower is not None or compiling_pays(model, known_bytes))
            recording: contextlib.AbstractContextManager[list[Compilation]] = contextlib.nullcontext([])
            if compiles:  # what compiles takes a while to import
                from moepass.compilations import record_compilations
                from moepass.stored_compile import StoredModule

                recording = record_compilations()
            scorer = load_scorer(options, compile_module if compiles else None, writer)
            gc.freeze()
        for warning in lines.first_text(scorer.warnings):
            typer.echo(f"moepass: warning: {warning}", err=True)
        done = written = agreeing = labelled = 0
        with recording as compilations, open_output(output, target) as sink, progress_bar("scoring") as shown:
            bar, task = shown
            for window in scorer.windows_of(parts, stops=on_error is _OnError.stop):
                for line, answer in _answers(window, scorer.labels, lines):
                    gold = line.further.get("label")
                    if isinstance(gold, str) and gold in scorer.label_numbers:
                        labelled += 1
                        agreeing += gold == answer["label"]
                    sink.write(msgspec.json.encode(answer) + b"\n")
                    written += 1
                sink.flush()
                done += len(window.texts)
                bar.update(task, completed=done, total=lines.count if lines.at_end else None)
            if not written:
                raise InputError(f"no line could be scored; {lines.report()}", name="input", value=input)
    note_refusals(compilations)
    if labelled:
        typer.echo(f"moepass: note: {agreeing} of {labelled} labels agree ({agreeing / labelled:.2%})", err=True)
    if lines.skipped:
        typer.echo(f"moepass: {lines.report()}", err=True)


class _Lines:
    """The lines of the input, as they are read, and the numbers of those that are skipped."""

    def __init__(self, source: Iterator[Line | BadLine], *, skips: bool) -> None:
        self._source, self._skips = source, skips
        self._ahead: list[Line] = []
        self._first = ""
        self._lock = threading.Lock()  # lines are read in one thread and scored in another
        self.count = 0
        self.at_end = False
        self.skipped = 0
        self._reasons: list[tuple[int, str]] = []

    def read_ahead(self, lines: int, characters: int) -> None:
        """Read so many lines, or lines of so many characters."""
        read = 0
        for line in self._read():
            self._ahead.append(line)
            read += len(line.text)
            if len(self._ahead) >= lines or read >= characters:
                break
        self._first = self._ahead[0].text if self._ahead else ""

    def known_bytes(self, source: str) -> int | None:
        """How long the input is, where that can be known."""
        if self.at_end:
            return sum(len(line.text) for line in self._ahead)
        return os.path.getsize(source) if os.path.isfile(source) else None

    def first_text(self, ask: Any) -> list[str]:
        """What `ask` says of the first line's text; nothing where there is none, or none that can be asked."""
        try:
            return list(ask(self._first)) if self._first else []
        except InputError:  # it is said with the line's number when its turn comes
            return []

    def __iter__(self) -> Iterator[Line]:
        while self._ahead:
            ahead, self._ahead = self._ahead, []
            yield from ahead
        yield from self._read()

    def _read(self) -> Iterator[Line]:
        for line in self._source:
            self.count += 1
            if isinstance(line, Line):
                yield line
            elif self._skips:
                self.skip(line.number, line.error)
            else:
                raise line.error
        self.at_end = True

    def skip(self, number: int, error: MoepassError) -> None:
        with self._lock:
            self.skipped += 1
            if len(self._reasons) < _NAMED_LINES:
                self._reasons.append((number, " ".join(str(error).split())[:500]))

    def report(self) -> str:
        """How many lines were skipped, and below it each with its reason."""
        more = self.skipped - len(self._reasons)
        reasons = [reason for _, reason in sorted(self._reasons)] + ([f"and {more} more"] if more else [])
        return "\n  ".join([f"skipped {self.skipped} of {self.count} lines:", *reasons])


def _answers(
    window: ScoredWindow[Line], labels: tuple[str, ...], lines: _Lines
) -> Iterator[tuple[Line, dict[str, Any]]]:
    from moepass.runtime.serving.offline.load_scorer import seven_digits

    probabilities, masses = seven_digits(window.probabilities).tolist(), seven_digits(window.mass).tolist()
    best = window.probabilities.argmax(1).tolist()
    for line, outcome in zip(window.texts, window.outcomes, strict=True):
        if not isinstance(outcome, int):
            lines.skip(line.number, outcome)
            continue
        further = {f"input_{key}" if key in _ANSWER_KEYS else key: value for key, value in line.further.items()}
        chances = dict(zip(labels, probabilities[outcome], strict=True))
        yield line, {"label": labels[best[outcome]], "probabilities": chances, "mass": masses[outcome], **further}
