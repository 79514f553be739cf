"""Packed expert weights, the modules that read them, and the store that owns them.

Start with `banks.py`: a bank is described by a `BankSpec`, stored as a `Bank`, and owned by a `BankStore`.
`banked_modules.py` lets a model read its experts from a bank. `mutation_guard.py` checks that they are unchanged.

May import transfer, kernels, system.
"""
