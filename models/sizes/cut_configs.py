"""A configuration cut to its first layers: enough of a deep model to see what a compiler makes of every kind of layer.

94 equal layers are found, rewritten or refused as one of them is, and take a minute to capture.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from moepass.models.sizes.architecture import Architecture
from moepass.models.sizes.families import from_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def telling_prefix(layers: Sequence[Hashable]) -> int:
    """The fewest first layers in which every kind of layer occurs."""
    return max((layers.index(kind) for kind in set(layers)), default=-1) + 1


def cut_config(config: PreTrainedConfig, architecture: Architecture) -> PreTrainedConfig | None:
    """A copy of `config` with the telling prefix of its layers alone; None where it cannot be cut.

    That is where nothing would be gained, and where what the cut configuration describes is not that prefix.
    `architecture` is that of `config`.
    """
    keep = telling_prefix(architecture.layers)
    count = len(architecture.layers)
    if keep == count:
        return None
    cut = copy.deepcopy(config)
    text: Any = cut.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:keep])
    text.num_hidden_layers = keep
    same = from_config(cut, name=architecture.name, dtype=architecture.dtype).layers == architecture.layers[:keep]
    return cut if same else None
