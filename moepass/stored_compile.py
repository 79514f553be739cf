"""Compile a module once for all processes: what one of them captured and compiled, the next one runs without Dynamo."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.fx import GraphModule

from moepass.compilations import note_compilation, pass_context
from moepass.models.version import __version__
from moepass.options import parse_options
from moepass.passes.graph.graph_records import NotStorableError
from moepass.runtime.banks.banked_modules import BankedParameter
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.banks.whole_models import whole_model_store
from moepass.runtime.captures.capture_record import CaptureRecord
from moepass.runtime.captures.capture_store import SCHEMA, CaptureStore, find_store
from moepass.runtime.captures.capture_watch import watch_capture
from moepass.runtime.captures.fingerprint import (
    describe_model,
    digest_of,
    environment,
    file_digests,
    machine,
    settings,
    short_versions,
    versions,
)
from moepass.runtime.captures.process_code import OUR_PACKAGES, foreign_code
from moepass.runtime.captures.stored_capture import StoredCapture, record_capture
from moepass.runtime.torch_private import is_autocasting

logger = logging.getLogger("moepass")


class StoredModule:
    """A module compiled with backend "asyncep": call it with tensors, without gradients.

    The first call takes what earlier processes stored for this module. If no stored graph fits a call,
    `torch.compile` handles it, and what that compiles is stored, if it can be.

    Captures are stored and used in processes that run no code of their own (see `process_code`), as those of the
    command line. The module, its hooks, its configuration and torch's settings must stay as they are from the first
    call on: only its parameters and buffers are looked at again. `torch.compile` is for everybody else.
    """

    def __init__(
        self, module: nn.Module, options: Mapping[str, Any], name: str, store: CaptureStore | None = None
    ) -> None:
        """`options` are those of the backend, `name` is what people call the model.

        `store` None takes that of the environment, if there is one.
        """
        self._module = module
        self._name = name
        self._options = parse_options(options)
        # dump needs a real compilation, debug and cudagraphs change the run: store nothing.
        is_special = self._options.dump is not None or self._options.debug or self._options.cudagraphs
        self._store = None if is_special else store or find_store()
        self._compiled: Any = torch.compile(module, backend=_asyncep, options=dict(options))
        self._captures: list[StoredCapture] | None = None
        # As the first call found it.
        self._is_inference = False
        # Digests of what the stored captures depend on. Empty if the compiled model cannot be stored.
        self._digests: dict[str, str] = {}
        self._has_compiled = False
        self._told: set[str] = set()

    def __call__(self, *arguments: torch.Tensor) -> torch.Tensor:
        if self._store is None or torch.is_grad_enabled() or is_autocasting():
            return self._call_compiled(*arguments)
        if self._captures is None:
            self._captures, self._is_inference = self._load(self._store), torch.is_inference_mode_enabled()
        if torch.is_inference_mode_enabled() != self._is_inference:
            self._tell("one call in torch.inference_mode, one without it")
            return self._call_compiled(*arguments)
        for capture in list(self._captures):
            try:
                inputs = capture.inputs_for(arguments)
                if inputs is not None:
                    self._prepare(capture)
            except ValueError as error:
                self._store.report(self._key()[:12], str(error))
                self._captures.remove(capture)
                continue
            if inputs is not None:
                result: torch.Tensor = capture.run(inputs)
                return result
        return self._call_and_store(self._store, arguments) if self._digests else self._call_compiled(*arguments)

    def _prepare(self, capture: StoredCapture) -> None:
        """Raises ValueError where the capture is damaged."""
        if "executor" not in vars(capture):
            note_compilation(capture.executor, capture.context)
            logger.info("%s runs as an earlier process has compiled it", self._name)

    def _load(self, store: CaptureStore) -> list[StoredCapture]:
        try:
            self._digests, _ = self._describe()
        except NotStorableError as error:
            self._do_not_store(error)
            return []
        found = []
        for content in store.load(self._key()):
            try:
                record = msgspec.json.decode(content, type=CaptureRecord)
                if file_digests(record.sources) != record.sources:
                    raise NotStorableError("other sources of the model")
                if {name: os.environ.get(name) for name in record.environment} != record.environment:
                    raise NotStorableError("other values of environment variables")
                banks = _bank_store(self._module)
                context = pass_context(self._options, banks, whole_model_store(self._module.parameters()))
                found.append(StoredCapture(record, self._module, banks, context))
            except NotStorableError as error:
                logger.info("a stored capture of %s is not used, because it is of %s", self._name, error)
            except ValueError as error:  # msgspec's errors are ValueErrors
                store.report(self._key()[:12], str(error))
        return found

    def _call_and_store(self, store: CaptureStore, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with watch_capture(lambda: describe_model(self._module)[1]) as watch:
            result = self._call_compiled(*arguments)
        if not watch.graphs and not watch.problem:
            if not self._has_compiled:
                self._tell("a call of which Dynamo compiles nothing")
            return result
        self._has_compiled = True
        try:
            digests, tensors = self._describe()
            changed = [name for name, digest in digests.items() if digest != self._digests[name]]
            if not changed and [id(tensor) for tensor in watch.tensors] != [id(tensor) for tensor in tensors]:
                changed = ["tensors of the model"]
            if changed:
                self._captures = []
                raise NotStorableError(f"since the first call changed: {', '.join(changed)}")
            record = record_capture(watch, self._module, arguments, result)
        except NotStorableError as error:
            self._do_not_store(error)
            return result
        content = msgspec.json.encode(record)
        store.save(self._key(), record.name(), content, self._name, {"moepass": __version__, **short_versions()})
        return result

    def _call_compiled(self, *arguments: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._compiled(*arguments)
        return result

    def _do_not_store(self, reason: Exception) -> None:
        self._tell(str(reason))
        self._digests = {}

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.info("what is compiled for %s is not stored for later processes: %s", self._name, reason)

    def _key(self) -> str:
        return digest_of(self._digests)

    def _describe(self) -> tuple[dict[str, str], list[torch.Tensor]]:
        """Digests of what a capture depends on, and the tensors of the model. Raises NotStorableError."""
        if reason := foreign_code():
            raise NotStorableError(reason)
        try:
            model, tensors = describe_model(self._module)
            description = {
                "schema": SCHEMA,
                "moepass": _own_digest(),
                "versions": versions(),
                "environment": environment(),
                "machine": machine(tensor.device for tensor in tensors),
                "settings": settings(),
                "options": repr(self._options),
                "model": model,
            }
            return {name: digest_of(part) for name, part in description.items()}, tensors
        except (ValueError, RecursionError) as error:  # of texts of numbers, of JSON, and of lists in lists
            raise NotStorableError(f"a value of the model has no text: {type(error).__name__}: {error}") from error


def _asyncep(graph: GraphModule, example_inputs: Sequence[Any], **keywords: Any) -> Callable[..., Any]:
    """The backend, imported when something is compiled: where a stored capture runs, nobody waits for its imports."""
    from moepass.backend import asyncep

    return asyncep(graph, example_inputs, **keywords)


def _bank_store(module: nn.Module) -> BankStore | None:
    stores = {id(part.store): part.store for part in module.modules() if isinstance(part, BankedParameter)}
    if len(stores) > 1:
        raise NotStorableError("a model of several offload_experts calls")
    return next(iter(stores.values()), None)


@functools.cache
def _own_digest() -> str:
    """Digest of all source files of moepass."""
    roots = {Path(folder) for name in OUR_PACKAGES for folder in sys.modules[name].__path__}
    # Each once, as this process has found it: links on the way count.
    files = {path.resolve(): path for root in roots for path in root.rglob("*.py")}
    digests = file_digests(files.values())
    return digest_of([[Path(file).name, digest] for file, digest in digests.items()])
