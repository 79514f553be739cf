"""Configurations cut to their first layers, so that a compiler still sees every kind of layer of a deep model.

94 equal layers are detected, rewritten or refused like one of them, but take a minute to capture.
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
    """Return the smallest number of first layers in which every kind of layer occurs."""
    return max((layers.index(kind) for kind in set(layers)), default=-1) + 1


def cut_config(config: PreTrainedConfig, architecture: Architecture) -> PreTrainedConfig | None:
    """Return a copy of `config` with only the telling prefix of its layers, or None if it cannot be cut.

    Returns None if nothing would be gained, and if the cut configuration does not describe this prefix. `architecture`
    is that of `config`.
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
