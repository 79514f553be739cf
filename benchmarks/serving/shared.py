"""What these benchmarks share with those of the folder above."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common import median_and_spread, print_table, reference_model, verdict
from published import REAL, real_shape

__all__ = ["REAL", "median_and_spread", "print_table", "real_shape", "reference_model", "verdict"]
