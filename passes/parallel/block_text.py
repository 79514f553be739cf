"""Text of a parallel block and its local form. Blocks with equal texts share one proof."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moepass.passes.graph.canonical_text import CanonicalText, describe_constant_here, describe_value
from moepass.passes.graph.nodes import constant_of, fake_value
from moepass.passes.parallel.local_form.local_experts import LocalForm
from moepass.passes.parallel.match.parallel_block import ParallelBlock


def block_text(block: ParallelBlock, local: LocalForm, result: Node) -> str:
    """Return all data on which a proof of the block depends: nodes, sizes, dtypes, constants and roles of nodes."""
    size_texts: dict[Any, str] = {}
    text = CanonicalText(lambda node: _describe_source(node, size_texts))
    for node in dict.fromkeys((*block.sources.values(), *block.expert_tensors, *local.complete.values())):
        text.add_source(node)
    for node in (*block.region, *local.written):
        text.add(node, describe_value(fake_value(node), size_texts))
    gemms = [(gemm.node, gemm.weights, gemm.activations, gemm.inner, gemm.outer) for gemm in block.gemms]
    text.remark(
        f"{block.form}, {block.group}, experts {block.bounds}, drops {block.drops}",
        f"sources {text.names(dict(block.sources))}, sink {text.names(block.sink)}, result {text.names(result)}",
        f"exchanges {text.names([(exchange.node, exchange.result) for exchange in block.exchanges])}",
        f"gemms {text.names(gemms)}, of the local form {text.names(list(local.gemms.items()))}",
        f"experts {text.names(block.expert_tensors)}, complete {text.names(list(local.complete.items()))}",
        f"rows {text.names((local.rows, local.ends, local.row_ids, local.outputs, *local.travelling))}",
        *(
            f"{what} {text.names([node for node in block.region if node in nodes])}"
            for what, nodes in (("copied", local.copied), ("left out", local.left_out))
        ),
    )
    return str(text)


def _describe_source(node: Node, size_texts: dict[Any, str]) -> str:
    if node.op == "get_attr":
        return f"constant {describe_constant_here(str(node.target), constant_of(node))}"
    return f"source {describe_value(fake_value(node), size_texts)}"
