"""The debug option `dump`: every intermediate graph and the plan, as files that a person can read."""

from __future__ import annotations

from pathlib import Path

from torch.fx import GraphModule

from moepass.models.errors import OptionError
from moepass.passes.ir import Plan


class GraphDump:
    """Observer of the passes: writes `NN-PASS.py` for each into a new folder `graph-K` below `folder`."""

    def __init__(self, folder: str) -> None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            number = len(list(Path(folder).glob("graph-*")))
            self.folder = Path(folder) / f"graph-{number}"
            self.folder.mkdir()
        except OSError as error:
            raise OptionError(f"option dump is {folder!r}, which cannot be written: {error.strerror}") from error
        self._count = 0

    def __call__(self, name: str, module: GraphModule, plan: Plan) -> None:
        text = module.print_readable(print_output=False)
        for child_name, child in module.named_children():
            if isinstance(child, GraphModule):
                text += f"\n\n# {child_name}\n{child.print_readable(print_output=False)}"
        (self.folder / f"{self._count:02d}-{name}.py").write_text(text)
        self._count += 1

    def write_plan(self, plan: Plan) -> None:
        (self.folder / "plan.json").write_text(plan.to_json() + "\n")
