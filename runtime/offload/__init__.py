"""Moving a model's experts to their home, from memory or from a checkpoint.

Start with `offload.py` (`offload_experts`) and `loading.py` (`load_pretrained`). `placement.py` asks the planner which
layers stay on the device.

May import profiles, homes/options, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system.
"""
