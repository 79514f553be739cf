"""The engine of one rank: requests become a step, the step runs, answers are read from its states.

Pseudo-code
    step(requests):
        what does the cache hold of each?
        pack them: every distinct token that is needed, once; blocks that are worth keeping get a place in the cache
        run the step: states at the places that are read
        scores of tokens, a few rows at a time; vectors; answers
        where memory does not suffice: the same in two halves, and smaller steps from then on
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.block_hashes import RequestHashes, request_hashes
from moepass.runtime.serving.batching.pack import PackedStep, pack, unshared_flops
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices, StepBatch
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.cache.block_index import BlockIndex
from moepass.runtime.serving.engine.model_head import ModelHead
from moepass.runtime.serving.engine.step_engine import EngineFacts, StepResult
from moepass.runtime.serving.engine.step_reads import StepReads
from moepass.runtime.serving.engine.token_scores import TokenScores, score_tokens
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request
