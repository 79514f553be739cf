"""moepass: a torch.compile backend that moves expert weights instead of activations, for prefill-only work.

torch.compile(model, backend="asyncep")        compile a model with the backend
moepass.offload_experts(model)                 keep experts in host memory, and stream them while layers compute
moepass.load_pretrained(path)                  the same for a checkpoint; each rank reads only its own experts
moepass.Host, Device, Peer, Hybrid, Disk       homes with options: offload_experts(model, home=Peer(...))
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
    from moepass.compilations import Compilation as Compilation
    from moepass.compilations import record_compilations as record_compilations
    from moepass.explaining.explain_model import explain as explain
    from moepass.explaining.report import Report as Report
    from moepass.models.errors import CheckpointError as CheckpointError
    from moepass.models.errors import InputError as InputError
    from moepass.models.errors import MoepassError as MoepassError
    from moepass.models.errors import OptionError as OptionError
    from moepass.options import Options as Options
    from moepass.passes.ir.plan import Plan as Plan
    from moepass.runtime.execute.gather_only import gather_only_step as gather_only_step
    from moepass.runtime.homes.options.home_options import Device as Device
    from moepass.runtime.homes.options.home_options import Disk as Disk
    from moepass.runtime.homes.options.home_options import Host as Host
    from moepass.runtime.homes.options.home_options import Hybrid as Hybrid
    from moepass.runtime.homes.options.home_options import Peer as Peer
    from moepass.runtime.integrations.transformers_ep import register_transformers as register_transformers
    from moepass.runtime.kernels.grouped_gemm.tuner import tune_kernels as tune_kernels
    from moepass.runtime.offload.loading import load_pretrained as load_pretrained
    from moepass.runtime.offload.loading import offload_report as offload_report
    from moepass.runtime.offload.offload import OffloadReport as OffloadReport
    from moepass.runtime.offload.offload import offload_experts as offload_experts
    from moepass.runtime.transfer.recording import record_timeline as record_timeline

# Names are imported on first use, because `moepass --help` must not wait for torch.
_NAMES = {
    "moepass.compilations": ("Compilation", "record_compilations"),
    "moepass.explaining.explain_model": ("explain",),
    "moepass.explaining.report": ("Report",),
    "moepass.models.errors": ("CheckpointError", "InputError", "MoepassError", "OptionError"),
    "moepass.options": ("Options",),
    "moepass.passes.ir.plan": ("Plan",),
    "moepass.runtime.execute.gather_only": ("gather_only_step",),
    "moepass.runtime.homes.options.home_options": ("Device", "Disk", "Host", "Hybrid", "Peer"),
    "moepass.runtime.integrations.transformers_ep": ("register_transformers",),
    "moepass.runtime.kernels.grouped_gemm.tuner": ("tune_kernels",),
    "moepass.runtime.offload.loading": ("load_pretrained", "offload_report"),
    "moepass.runtime.offload.offload": ("OffloadReport", "offload_experts"),
    "moepass.runtime.transfer.recording": ("record_timeline",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'moepass' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


# If transformers is already imported, register now. After a later import, call moepass.register_transformers().
if "transformers.distributed.expert_parallel" in sys.modules:
    __getattr__("register_transformers")()
