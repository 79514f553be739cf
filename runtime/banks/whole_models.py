"""The stores of models whose experts all fit into the memory budget, so that none was moved into a bank.

Their expert weights lead to the store, which has the planner's decisions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from moepass.runtime.banks.banks import BankStore

_stores: WeakIdKeyDictionary = WeakIdKeyDictionary()


def keep_whole_model_store(experts: Iterable[torch.Tensor], store: BankStore | None) -> None:
    """Associate `experts` with `store`, which has no banks. None removes the association."""
    for weight in experts:
        _stores.pop(weight, None)
        if store is not None:
            _stores[weight] = store


def whole_model_store(tensors: Iterable[object]) -> BankStore | None:
    """Return the store associated with the first expert weight among `tensors`; None if there is no such weight."""
    stores = (_stores.get(value) for value in tensors if isinstance(value, torch.Tensor))
    return next((store for store in stores if store is not None), None)
