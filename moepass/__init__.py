"""moepass: a torch.compile backend that moves expert weights instead of activations, for prefill-only work.

torch.compile(model, backend="asyncep")        compile a model with the backend
moepass.offload_experts(model)                 keep experts in host memory, and stream them while layers compute
moepass.load_pretrained(path)                  the same from a checkpoint, of which each rank reads only its own experts
moepass.Host, Peer, Hybrid, Disk               homes with options: offload_experts(model, home=Peer(...))
moepass.gather_only_step(model)                take part in a step without tokens, with transport "collective"
moepass.explain(model)                         plan a model on a machine, without that machine
moepass.record_compilations()                  record the plans of compiled models
moepass.record_timeline()                      record when segments, transfers and waits happened
moepass.tune_kernels()                         tune the Triton kernels of experts that run in the block (GPU)
moepass.register_transformers()                enable DistributedConfig(..., ep_implementation="asyncep")

Start reading at `backend.py`, which compiles a graph, and at `cli/main.py`, the command line.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from moepass.models.version import __version__ as __version__

if TYPE_CHECKING:
    from moepass.compilations import Compilation, record_compilations
    from moepass.explaining.explain_model import explain
    from moepass.explaining.report import Report
    from moepass.models.errors import CheckpointError, InputError, MoepassError, OptionError
    from moepass.options import Options
    from moepass.passes.ir.plan import Plan
    from moepass.runtime.execute.gather_only import gather_only_step
    from moepass.runtime.homes.options.home_options import Disk, Host, Hybrid, Peer
    from moepass.runtime.integrations.transformers_ep import register_transformers
    from moepass.runtime.kernels.grouped_gemm.tuner import tune_kernels
    from moepass.runtime.offload.loading import load_pretrained, offload_report
    from moepass.runtime.offload.offload import OffloadReport, offload_experts
    from moepass.runtime.transfer.recording import record_timeline

__all__ = [
    "CheckpointError",
    "Compilation",
    "Disk",
    "Host",
    "Hybrid",
    "InputError",
    "MoepassError",
    "OffloadReport",
    "OptionError",
    "Options",
    "Peer",
    "Plan",
    "Report",
    "explain",
    "gather_only_step",
    "load_pretrained",
    "offload_experts",
    "offload_report",
    "record_compilations",
    "record_timeline",
    "register_transformers",
    "tune_kernels",
]

# Names are imported on first use, because `moepass --help` must not wait for torch.
_MODULE_OF = {
    "CheckpointError": "moepass.models.errors",
    "Compilation": "moepass.compilations",
    "Disk": "moepass.runtime.homes.options.home_options",
    "Host": "moepass.runtime.homes.options.home_options",
    "Hybrid": "moepass.runtime.homes.options.home_options",
    "InputError": "moepass.models.errors",
    "MoepassError": "moepass.models.errors",
    "OffloadReport": "moepass.runtime.offload.offload",
    "OptionError": "moepass.models.errors",
    "Options": "moepass.options",
    "Peer": "moepass.runtime.homes.options.home_options",
    "Plan": "moepass.passes.ir.plan",
    "Report": "moepass.explaining.report",
    "explain": "moepass.explaining.explain_model",
    "gather_only_step": "moepass.runtime.execute.gather_only",
    "load_pretrained": "moepass.runtime.offload.loading",
    "offload_experts": "moepass.runtime.offload.offload",
    "offload_report": "moepass.runtime.offload.loading",
    "record_compilations": "moepass.compilations",
    "record_timeline": "moepass.runtime.transfer.recording",
    "register_transformers": "moepass.runtime.integrations.transformers_ep",
    "tune_kernels": "moepass.runtime.kernels.grouped_gemm.tuner",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'moepass' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


# If transformers is already imported, register now. After a later import, call moepass.register_transformers().
if "transformers.distributed.expert_parallel" in sys.modules:
    __getattr__("register_transformers")()
