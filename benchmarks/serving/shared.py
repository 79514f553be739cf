"""Names that these benchmarks share with the benchmarks of the parent folder."""

from __future__ import annotations

from benchmarks.common import median_and_spread, print_table, reference_model, verdict
from benchmarks.published import REAL, real_shape

__all__ = ["REAL", "median_and_spread", "print_table", "real_shape", "reference_model", "verdict"]
