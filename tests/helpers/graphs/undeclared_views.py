"""Run every ATen operator whose schema declares no view, and print those that return a view.

This is a program, because some operators end the process on unsuitable arguments: each batch runs in a child.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCH = 60
LISTS = {"split_sizes": [2, 2], "dims": [0, 1], "repeats": [1, 1], "pad": [0, 0], "size": [4, 4], "stride": [4, 1]}
INTEGERS = {"dim": 0, "start": 0, "end": 4, "length": 4, "dtype": 6}


class Watch(TorchDispatchMode):
    """Records operators that return a view of an argument, after composite operators are decomposed."""

    found: set[str]

    def __init__(self) -> None:
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if all(value.alias_info is None for value in func._schema.returns):
            taken = {value.untyped_storage()._cdata for value in _tensors((args, kwargs)) if value.numel()}
            if any(value.untyped_storage()._cdata in taken for value in _tensors(result)):
                self.found.add(str(func))
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and value.layout is torch.strided]


def operators() -> list[torch._ops.OpOverload]:
    candidates = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        base, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or base.startswith(("_test", "_foobar", "_nested")):
            continue
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if isinstance(operator, torch._ops.OpOverload):
            schema = operator._schema
            gives = any("Tensor" in str(value.type) for value in schema.returns)
            if gives and not schema.is_mutable and all(value.alias_info is None for value in schema.returns):
                candidates.append(operator)
    return candidates


def _argument(argument: Any, tensor: torch.Tensor, number: int, flag: bool) -> Any:
    kind, name = str(argument.type), argument.name
    values = {
        "Tensor": tensor, "List[Tensor]": [tensor, tensor], "List[Optional[Tensor]]": [torch.tensor([0, 1])],
        "int": INTEGERS.get(name, number), "SymInt": INTEGERS.get(name, number), "float": 1.0, "number": 1,
        "bool": flag, "List[int]": LISTS.get(name, [1, 1]), "List[SymInt]": LISTS.get(name, [1, 1]),
    }  # fmt: skip
    return values.get(kind)


def run(batch: Sequence[torch._ops.OpOverload], answer: int) -> None:
    for operator in batch:
        os.write(answer, f"ran {operator}\n".encode())
        signal.setitimer(signal.ITIMER_VIRTUAL, 5)  # seconds of computation, then this process ends
        watch = Watch()
        for tensor in (torch.ones(4, 4), torch.arange(4), torch.ones(4, 4).t()):
            for number, flag in ((1, False), (2, True)):
                arguments: list[Any] = []
                named: dict[str, Any] = {}
                for argument in operator._schema.arguments:
                    if not argument.has_default_value():
                        value = _argument(argument, tensor, number, flag)
                        named.update({argument.name: value}) if argument.kwarg_only else arguments.append(value)
                try:
                    with torch.no_grad(), watch:
                        operator(*arguments, **named)
                except Exception:  # most arguments fit few operators
                    continue
        for name in sorted(watch.found):
            os.write(answer, f"view {name}\n".encode())


def main() -> None:
    torch.set_num_threads(1)
    remaining, views = operators(), set()
    while remaining:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            run(remaining[:BATCH], writer)
            os._exit(0)
        os.close(writer)
        with open(reader) as answer:
            lines = [line.split() for line in answer]
        os.waitpid(child, 0)
        views |= {name for word, name in lines if word == "view"}
        remaining = remaining[max(1, sum(word == "ran" for word, _ in lines)) :]
    print("\n".join(sorted(views)))


if __name__ == "__main__":
    main()
