"""moepass: a torch.compile backend that moves expert weights instead of activations, for prefill-only work.

    torch.compile(model, backend="asyncep")        the backend
    moepass.offload_experts(model)                 experts rest in host memory and stream while layers compute
    moepass.record_compilations()                  the plans behind a compiled model
"""

from moepass.backend import Compilation, record_compilations
from moepass.models.errors import CheckpointError, InputError, MoepassError, OptionError
from moepass.options import Options
from moepass.passes.ir import Plan
from moepass.runtime.offload import OffloadReport, offload_experts

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Compilation",
    "InputError",
    "MoepassError",
    "OffloadReport",
    "OptionError",
    "Options",
    "Plan",
    "offload_experts",
    "record_compilations",
]
