"""Compile a module once for all processes: a later process runs the stored result without Dynamo."""

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
from transformers.utils import import_utils

from moepass.compilations import note_compilation, pass_context
from moepass.models.version import __version__
from moepass.options import parse_options
from moepass.passes.graph.graph_records import NotStorableError
from moepass.runtime.banks.banked_modules import BankedParameter
from moepass.runtime.banks.banks import BankStore, whole_model_store
from moepass.runtime.captures import fingerprint
from moepass.runtime.captures.capture_record import CaptureRecord
from moepass.runtime.captures.capture_store import SCHEMA, CaptureStore, find_store
from moepass.runtime.captures.capture_watch import watch_capture
from moepass.runtime.captures.process_code import OUR_PACKAGES, foreign_code
from moepass.runtime.captures.stored_capture import StoredCapture, record_capture
from moepass.runtime.torch_private import is_autocasting, trace_without_warning

logger = logging.getLogger("moepass")


class StoredModule:
    """A module compiled with backend "asyncep": call it with tensors, without gradients.

    The first call loads the captures that earlier processes stored for this module. If no stored capture fits a call,
    `torch.compile` handles it, and its result is stored if that is possible.

    Captures are stored and used only in processes that run installed code (see `process_code`), such as moepass's
    command line. From the first call on, the module, its hooks, its configuration and torch's settings must not change;
    only parameters and buffers are checked again. Other programs should use `torch.compile`.

    `name` is the model's name in log lines and in `moepass cache`. `store` is by default the environment's store, if
    any.
    """

    def __init__(
        self, module: nn.Module, options: Mapping[str, Any], name: str, store: CaptureStore | None = None
    ) -> None:
        self._module = module
        self._name = name
        self._options = parse_options(options)
        # dump needs a compilation, and debug and cudagraphs change the run, so these are not stored.
        is_special = self._options.dump is not None or self._options.debug or self._options.cudagraphs
        self._store = None if is_special else store or find_store()
        # Models of transformers ask for the versions of packages, which do not change while a process runs.
        trace_without_warning(function for function in vars(import_utils).values() if hasattr(function, "cache_info"))
        self._compiled: Any = torch.compile(module, backend=_asyncep, options=dict(options))
        self._captures: list[StoredCapture] | None = None
        # The mode of the first call.
        self._is_inference = False
        # Digests of everything that captures depend on. Empty if the compiled model cannot be stored.
        self._digests: dict[str, str] = {}
        self._has_compiled = False
        self._logged: set[str] = set()

    def __call__(self, *arguments: torch.Tensor) -> torch.Tensor:
        """Return the module's result."""
        if self._store is None or torch.is_grad_enabled() or is_autocasting():
            return self._call_compiled(*arguments)
        if self._captures is None:
            self._captures, self._is_inference = self._load(self._store), torch.is_inference_mode_enabled()
        if torch.is_inference_mode_enabled() != self._is_inference:
            self._log_once("some calls are in torch.inference_mode and some are not")
            return self._call_compiled(*arguments)
        for capture in list(self._captures):
            try:
                inputs = capture.inputs_for(arguments)
                if inputs is not None and "executor" not in vars(capture):
                    note_compilation(capture.executor, capture.context)  # raises ValueError for a damaged capture
                    logger.info("%s runs as an earlier process compiled it", self._name)
            except ValueError as error:
                self._store.report(self._key()[:12], str(error))
                self._captures.remove(capture)
                continue
            if inputs is not None:
                result: torch.Tensor = capture.run(inputs)
                return result
        return self._call_and_store(self._store, arguments) if self._digests else self._call_compiled(*arguments)

    def _load(self, store: CaptureStore) -> list[StoredCapture]:
        try:
            self._digests, _ = self._describe()
        except NotStorableError as error:
            self._do_not_store(error)
            return []
        captures = []
        for content in store.load(self._key()):
            try:
                record = msgspec.json.decode(content, type=CaptureRecord)
                if fingerprint.file_digests(record.sources) != record.sources:
                    raise NotStorableError("source files of the model changed since it was stored")
                if {name: os.environ.get(name) for name in record.environment} != record.environment:
                    raise NotStorableError("environment variables changed since it was stored")
                banks = _bank_store(self._module)
                context = pass_context(self._options, banks, whole_model_store(self._module.parameters()))
                captures.append(StoredCapture(record, self._module, banks, context))
            except NotStorableError as error:
                logger.info("a stored capture of %s is not used: %s", self._name, error)
            except ValueError as error:  # msgspec's errors are ValueErrors
                store.report(self._key()[:12], str(error))
        return captures

    def _call_and_store(self, store: CaptureStore, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with watch_capture(lambda: fingerprint.describe_model(self._module)[1]) as watch:
            result = self._call_compiled(*arguments)
        if not watch.graphs and not watch.problem:
            if not self._has_compiled:
                self._log_once("Dynamo compiles nothing in a call")
            return result
        self._has_compiled = True
        try:
            digests, tensors = self._describe()
            changed = [name for name, digest in digests.items() if digest != self._digests[name]]
            if not changed and [id(tensor) for tensor in watch.tensors] != [id(tensor) for tensor in tensors]:
                changed = ["tensors of the model"]
            if changed:
                self._captures = []
                raise NotStorableError(f"these changed since the first call: {', '.join(changed)}")
            record = record_capture(watch, self._module, arguments, result)
        except NotStorableError as error:
            self._do_not_store(error)
            return result
        content = msgspec.json.encode(record)
        versions = {"moepass": __version__, **fingerprint.short_versions()}
        store.save(self._key(), record.name(), content, self._name, versions)
        return result

    def _call_compiled(self, *arguments: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._compiled(*arguments)
        return result

    def _do_not_store(self, reason: Exception) -> None:
        self._log_once(str(reason))
        self._digests = {}

    def _log_once(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            logger.info("the compiled %s is not stored for later processes: %s", self._name, reason)

    def _key(self) -> str:
        return fingerprint.digest_of(self._digests)

    def _describe(self) -> tuple[dict[str, str], list[torch.Tensor]]:
        """Return digests of everything on which a capture depends, and the model's tensors. Raises NotStorableError."""
        if reason := foreign_code():
            raise NotStorableError(reason)
        try:
            model, tensors = fingerprint.describe_model(self._module)
            description = {
                "schema": SCHEMA,
                "moepass": _own_digest(),
                "versions": fingerprint.versions(),
                "environment": fingerprint.environment(),
                "machine": fingerprint.machine(tensor.device for tensor in tensors),
                "settings": fingerprint.settings(),
                "options": repr(self._options),
                "model": model,
            }
            return {name: fingerprint.digest_of(value) for name, value in description.items()}, tensors
        except (ValueError, RecursionError) as error:  # huge numbers, deep nesting
            text = f"a value of the model cannot be described: {type(error).__name__}: {error}"
            raise NotStorableError(text) from error


def _asyncep(graph: GraphModule, example_inputs: Sequence[Any], **keywords: Any) -> Callable[..., Any]:
    """Call the backend, which is imported only now: a stored capture starts without these imports."""
    from moepass.backend import asyncep

    return asyncep(graph, example_inputs, **keywords)


def _bank_store(module: nn.Module) -> BankStore | None:
    stores = {id(banked.store): banked.store for banked in module.modules() if isinstance(banked, BankedParameter)}
    if len(stores) > 1:
        raise NotStorableError("the model was offloaded by several offload_experts calls")
    return next(iter(stores.values()), None)


@functools.cache
def _own_digest() -> str:
    """Return a digest of all source files of moepass."""
    roots = {Path(folder) for name in OUR_PACKAGES for folder in sys.modules[name].__path__}
    # Each file once, under the path by which it was imported, because links on that path count.
    files = {path.resolve(): path for root in roots for path in root.rglob("*.py")}
    digests = fingerprint.file_digests(files.values())
    return fingerprint.digest_of([[Path(file).name, digest] for file, digest in digests.items()])
