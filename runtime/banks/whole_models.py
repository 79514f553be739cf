"""Models of which no bank was moved, because all of them fit into the memory budget: how they were planned is found
again by their expert weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from moepass.runtime.banks.banks import BankStore

_stores: WeakIdKeyDictionary = WeakIdKeyDictionary()


def keep_whole_model_store(experts: Iterable[torch.Tensor], store: BankStore | None) -> None:
    """From now on `experts` lead to `store`, which has no banks; None: to nothing, as after some of them were moved."""
    for weight in experts:
        _stores.pop(weight, None)
        if store is not None:
            _stores[weight] = store


def whole_model_store(tensors: Iterable[object]) -> BankStore | None:
    """The store of the model that one of `tensors` is an expert weight of; None for other tensors."""
    found = (_stores.get(value) for value in tensors if isinstance(value, torch.Tensor))
    return next((store for store in found if store is not None), None)
