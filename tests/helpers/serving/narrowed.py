"""A model's backbone whose last layer computes only the tokens that are read, as `make_engine` builds it."""

from __future__ import annotations

import torch
from torch import nn

from moepass.runtime.serving.attention.last_layer import LastLayer
from moepass.runtime.serving.attention.survey import AttentionSurvey
from moepass.runtime.serving.engine.plain_outputs import sequence_step
from moepass.runtime.serving.engine.trie_states import TrieBackbone, TrieStates


def narrowed_backbone(backbone: nn.Module, survey: AttentionSurvey) -> TrieBackbone:
    assert survey.last is not None
    last_layer = LastLayer()
    last_layer.attach(backbone, survey.last)
    states = TrieStates(TrieBackbone(backbone), survey.layers, None, torch.device("cpu"))
    last_layer.learn(lambda count: states.states(sequence_step(count)))
    return TrieBackbone(backbone, last_layer)
