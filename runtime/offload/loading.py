"""Loading of a model from a checkpoint folder, with its experts read straight into their home.

    plan      transformers builds the model from tensors that are not read yet (unread_tensors.py)
    pack      if asked for, this process's experts are read and packed (pack_experts.py)
    agree     homes `peer` and `hybrid`: all ranks check that they have the same checkpoint
    experts   `move_experts` copies this process's experts into its banks; only these are read
    dense     every other weight is read, once

No process ever has all experts in memory, and nothing is in memory twice: a stored tensor is copied from the mapped
file to its offset in the bank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from moepass.models.checkpoint import checkpoint_folders as checkpoints
from moepass.models.checkpoint.checkpoint_files import CheckpointFiles
from moepass.models.checkpoint.load_model import build_unread, read_weights
from moepass.models.checkpoint.unread_tensors import UnreadTensor
from moepass.models.checkpoint.weight_recipes import UnfollowedError
from moepass.models.errors import InputError, OptionError
from moepass.models.formulas.expert_placement import shard_bounds
from moepass.models.homes import home_named
from moepass.models.limits import MODEL, STORED, ExpertFormat
from moepass.passes.machine.hardware import Hardware
from moepass.runtime.banks.banked_modules import BankedParameter
from moepass.runtime.banks.banks import keep_whole_model_store, resting_tensors, whole_model_store
from moepass.runtime.banks.stored_bank import why_decoded
from moepass.runtime.homes.disk.disk_home import why_made
from moepass.runtime.homes.options.home_options import HomeOptions, SpreadOptions
from moepass.runtime.homes.options.packers import make_packer, options_of
from moepass.runtime.homes.peer_home import weights_digest
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.offload.offload import (
    OffloadReport,
    expert_parameters,
    expert_weights,
    find_expert_modules,
    move_experts,
    packed_experts,
    place_experts,
    resolve_device,
    streamed_layers,
)
from moepass.runtime.offload.pack_experts import check_format, format_topic
from moepass.runtime.offload.placement import PlanningOptions
from moepass.runtime.offload.residents import Residents
from moepass.runtime.ranks.agree import Topic, agree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("moepass")

_CHECKPOINT, _PACKED_CHECKPOINT = "description of its checkpoint", "description of its packed checkpoint"
_TITLE = "every rank of the group must call load_pretrained with the same home, and with the same group"

# A function of (bytes read so far, total bytes).
Progress = Callable[[int, int], object]


def load_pretrained(
    path: str | Path,
    *,
    home: str | HomeOptions = "host",
    device: torch.device | str | None = None,
    slots: int | None = None,
    resident_bytes: int = 0,
    resident_layers: Sequence[int] = (),
    memory_budget: str | float | None = None,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    tokens: int | tuple[int, int] | None = None,
    experts_compute: str = MODEL,
    dtype: torch.dtype | None = None,
    experts_implementation: str = "grouped_mm",
    progress: Progress | None = None,
    expert_format: ExpertFormat = STORED,
) -> PreTrainedModel:
    """Return the model in the checkpoint folder `path`, with its experts at `home`.

    Quantised experts rest and travel as they are stored, and are decoded into the slot; other quantised weights are
    decoded once.

    The model computes the same as after `from_pretrained` and `offload_experts`, but each process reads only the dense
    weights and its own experts: all experts with home `host`, those of its rank with `peer` and `hybrid`, where all
    ranks must call this, and with `disk` only the scales of quantised experts. Beyond these bytes it needs memory for
    one expert at most, or, with an `expert_format` that packs, for the packed experts of all layers. On the CPU dense
    weights are views of the mapped file, as with from_pretrained; ranks on one machine share them.

    No file of the checkpoint may change while it is loaded. (Truncating a file while dense weights are read from it
    ends the process with SIGBUS.)

    `offload_report(model)` returns the home and the bytes of the experts.

    Args:
        path: a checkpoint folder.
        home: where the experts rest, see `offload_experts`. Ranks wait `timeout_s` for each other before and after they
            read their experts, so it must exceed the difference between the fastest and the slowest rank.
        device: where the model computes, by default the CPU.
        slots: see `offload_experts`.
        resident_bytes: see `offload_experts`.
        resident_layers: see `offload_experts`.
        memory_budget: see `offload_experts`.
        hardware: see `offload_experts`.
        tokens: see `offload_experts`.
        experts_compute: see `offload_experts`.
        dtype: the dtype of the weights, by default the one in the checkpoint's config.
        experts_implementation: the implementation of experts in transformers.
        progress: a function of (bytes read, total bytes), called on each rank that passes one. By default a progress
            bar on rank 0 if stderr is a terminal.
        expert_format: see `offload_experts`. Layers that stay on `device` are read a second time.

    Raises:
        CheckpointError: `path` is not a checkpoint; files or tensors are missing, truncated, or do not fit the config;
            or a file changed while it was read.
        InputError: single experts cannot be read (a family whose conversion mixes experts).
        PeerError: ranks have different checkpoints, fail or do not respond.
        And the errors of `offload_experts`.
    """

    def planning() -> PlanningOptions:
        residents = Residents(resident_bytes, resident_layers)
        return PlanningOptions(memory_budget, hardware, tokens, slots, residents, experts_compute)

    return load_planned(
        path, options_of(home), device, planning, dtype, experts_implementation, progress, expert_format
    )


def load_planned(
    path: str | Path,
    options: HomeOptions,
    device: torch.device | str | None,
    planning: Callable[[], PlanningOptions],
    dtype: torch.dtype | None = None,
    experts_implementation: str = "grouped_mm",
    progress: Progress | None = None,
    expert_format: ExpertFormat = STORED,
) -> PreTrainedModel:
    """Return the model in the checkpoint folder `path`, see `load_pretrained`.

    `planning` returns the planning options; the other ranks learn of its errors.
    """
    check_format(expert_format, options.home)
    _check_options(dtype, progress)
    meeting = (
        PeerGroup.of(options.group, options.timeout_s, _TITLE).rendezvous
        if isinstance(options, SpreadOptions)
        else None
    )
    rank, ranks = (meeting.rank, meeting.size) if meeting is not None else (0, 1)
    with torch.inference_mode(False), torch.no_grad(), contextlib.ExitStack() as shown:
        with meeting.publishing_failures() if meeting is not None else contextlib.nullcontext():
            planned = planning()
            folder = checkpoints.resolve_model(path)
            unread_model = _UnreadModel(folder, *build_unread(folder, dtype, experts_implementation))
            compute_device = resolve_device(unread_model.model, device)
            on_read = None
            if expert_format != STORED:
                own_bytes = unread_model.own_bytes(rank, ranks, False)
                on_read = _first_bytes(own_bytes, shown.enter_context(shown_progress(progress, rank == 0, own_bytes)))
                unread_model.files.on_read = on_read
            packed = packed_experts(unread_model.model, expert_format, meeting, _CHECKPOINT)
            unread_model.files.on_read = None
            placement = place_experts(unread_model.model, planned, options, compute_device, packed)
            if not packed:
                unread_model.warn_of_decoded_experts()
            # Resident experts are read like dense weights.
            unread_model = dataclasses.replace(unread_model, resident=placement.resident)
            if expert_format == STORED:
                own_bytes = unread_model.own_bytes(rank, ranks, home_named(options.home).is_in_files)
            if meeting is not None:
                title = _CHECKPOINT if expert_format == STORED else _PACKED_CHECKPOINT
                topics = [format_topic(expert_format), *placement.topics, *unread_model.topics()]
                deque(agree(meeting, title, topics), maxlen=0)
        if expert_format == STORED:
            on_read = shown.enter_context(shown_progress(progress, rank == 0, own_bytes))
        unread_model.files.on_read = on_read
        packer = make_packer(options, compute_device)
        report = move_experts(unread_model.model, options, packer, compute_device, planned, placement, packed)
        unread_model.files.close()  # dense weights must not keep the experts' pages mapped
        read_weights(unread_model.model, report.store.device)
        if not report.layers:  # all experts are resident, and reading them made new parameters
            keep_whole_model_store(expert_weights(unread_model.model), report.store)
        unread_model.files.close()
        unread_model.files.check()
    return unread_model.model


def offload_report(model: nn.Module) -> OffloadReport:
    """Return the home and the bytes of a model's offloaded experts. Raises InputError for any other model."""
    stores = (module.store for module in model.modules() if isinstance(module, BankedParameter))
    store = next(stores, None) or whole_model_store(expert_weights(model))
    if store is None:
        raise InputError(f"{type(model).__name__} has no offloaded experts; call offload_experts or load_pretrained")
    return OffloadReport.of(store, tuple(find_expert_modules(model)))


@dataclasses.dataclass(frozen=True)
class _UnreadModel:
    """A model whose weights are not read yet, and the files that contain them."""

    folder: Path
    files: CheckpointFiles
    model: PreTrainedModel
    # The paths of the layers whose experts stay on the device.
    resident: tuple[str, ...] = ()

    def experts(self) -> dict[str, UnreadTensor]:
        """Return the tensors that go into banks, by name. Tensors that modules share appear once."""
        named = {
            id(value): (f"{path}.{name}", value)
            for path, modules in streamed_layers(self.model, self.resident).items()
            for module in modules
            for name, value in expert_parameters(module).items()
            if isinstance(value, UnreadTensor)
        }
        return dict(named.values())

    def dense(self) -> dict[str, UnreadTensor]:
        """Return all other tensors, with tied tensors once. They include experts that stay resident."""
        experts = {id(tensor) for tensor in self.experts().values()}
        weights = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: value for name, value in weights if isinstance(value, UnreadTensor) and id(value) not in experts}

    def own_bytes(self, rank: int, ranks: int, stays_in_files: bool) -> int:
        """Return the bytes of the files that `rank` reads to load the model.

        With `stays_in_files` it reads only the scales and block indices of banks that the checkpoint's files contain
        byte for byte. Raises InputError if a rank's experts cannot be read alone.
        """
        recipes = [tensor.recipe for tensor in self.dense().values()]
        banks = [expert_parameters(module) for module in find_expert_modules(self.model).values()]
        in_files = [bank for bank in banks if not why_made(resting_tensors(bank))] if stays_in_files else []
        unread = {id(value) for bank in in_files for value in bank.values()}
        for name, tensor in self.experts().items():
            if id(tensor) in unread:
                recipes += tensor.recipe.checked()
                continue
            bounds = shard_bounds(tensor.shape[0], ranks)
            try:
                recipes.append(tensor.recipe.rows(bounds[rank], bounds[rank + 1]))
                tensor.recipe.rows(0, 1)
            except UnfollowedError as error:
                raise InputError(
                    f"{name} of family {self.model.config.model_type!r} is computed by {error.operation}, which mixes "
                    "experts, so single experts cannot be read; use from_pretrained, then moepass.offload_experts",
                    name=name,
                    value=error.operation,
                ) from error
        return sum(stored.nbytes for recipe in recipes for stored in recipe.stored())

    def warn_of_decoded_experts(self) -> None:
        """Log a warning if quantised experts are decoded while they are loaded, so that all their bytes travel."""
        for path, module in find_expert_modules(self.model).items():
            if operation := why_decoded(expert_parameters(module)):
                logger.warning(
                    "the quantised experts of %s, and of layers like it, are decoded while they are loaded, because "
                    "this family computes them by %s; at rest and on the link they take the bytes of decoded weights",
                    path,
                    operation,
                )
                return

    def topics(self) -> list[Topic]:
        """Return the topics that all ranks must agree on, from cause to effect.

        The weights are compared by samples of the dense weights, because no rank reads all experts.
        """
        config = hashlib.blake2b((self.folder / checkpoints.CONFIG_FILE).read_bytes(), digest_size=8).hexdigest()
        sources = [stored for tensor in self.dense().values() for stored in tensor.recipe.stored()]
        samples = {stored.tensor.key: self.files.read(stored.tensor)[None] for stored in sources}
        dense = weights_digest(dict(sorted(samples.items())))
        self.files.close()
        digests = {
            f"{checkpoints.CONFIG_FILE} (a digest)": config,
            "the tensors in the checkpoint (a digest of names, types and shapes)": self.files.digest(),
            "the dense weights in the checkpoint (a digest)": dense,
        }
        return [Topic(name, digest, "give every rank the same checkpoint") for name, digest in digests.items()]


def _first_bytes(total_bytes: int, on_read: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """Return `on_read` for the first `total_bytes` alone, because some layers are read again."""
    if on_read is None:
        return None
    left_bytes = total_bytes

    def add(nbytes: int) -> None:
        nonlocal left_bytes
        counted_bytes = min(nbytes, left_bytes)
        left_bytes -= counted_bytes
        on_read(counted_bytes)

    return add


def _check_options(dtype: object, progress: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError.wrong("dtype", dtype, "a floating point type such as torch.bfloat16, or None")
    if progress is not None and not callable(progress):
        raise OptionError.wrong("progress", progress, "a function of (bytes_read, bytes_in_all), or None")


@contextlib.contextmanager
def shown_progress(hook: Progress | None, is_first: bool, total_bytes: int) -> Iterator[Callable[[int], None] | None]:
    """Yield the function to call with the bytes of each read; None if progress is not shown.

    Without a `hook`, the first rank shows a progress bar if stderr is a terminal.
    """
    if hook is not None:
        done_bytes = 0

        def add(nbytes: int) -> None:
            nonlocal done_bytes
            done_bytes += nbytes
            hook(done_bytes, total_bytes)

        yield add
    elif is_first and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("loading"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total_bytes)
            yield lambda nbytes: bar.advance(task, nbytes)
    else:
        yield None
