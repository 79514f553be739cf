"""The debug option `dump`: every intermediate graph and the plan, as readable files."""

from __future__ import annotations

import itertools
from pathlib import Path

from torch.fx import GraphModule

from moepass.models.errors import OptionError
from moepass.passes.ir.plan import Plan


def _readable(module: GraphModule) -> str:
    # AOT names its graphs <lambda>, which is not a valid class name.
    return module.print_readable(print_output=False).replace("class <lambda>(", "class Graph(")


class GraphDump:
    """An observer of the passes. It writes `NN-PASS.py` for each pass into a new folder `graph-K` in `folder`.

    Raises:
        OptionError: `folder` cannot be written.
    """

    def __init__(self, folder: str) -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            existing = {path.name for path in Path(folder).iterdir()}
            name = next(name for name in map("graph-{}".format, itertools.count()) if name not in existing)
            self.folder = Path(folder) / name
            self.folder.mkdir()
        except OSError as error:
            raise OptionError(
                f"option dump is {folder!r}, which cannot be written: {error.strerror}", name="dump", value=folder
            ) from error
        self._count = 0

    def __call__(self, name: str, module: GraphModule, plan: Plan) -> None:
        """Write the graph after the pass `name`, with its segments."""
        text = _readable(module)
        for child_name, child in module.named_children():
            if isinstance(child, GraphModule):
                text += f"\n\n# {child_name}\n{_readable(child)}"
        (self.folder / f"{self._count:02d}-{name}.py").write_text(text)
        self._count += 1

    def write_plan(self, plan: Plan) -> None:
        """Write `plan.json`, replacing an earlier one."""
        (self.folder / "plan.json").write_text(plan.to_json() + "\n")
