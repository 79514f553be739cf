"""Moving a model's experts to their home, from memory or from a checkpoint.

Start with `offload.py` (`offload_experts`) and `loading.py` (`load_pretrained`). `placement.py` asks the planner which
layers stay on the device. `pack_experts.py` packs experts on their way to a home; `pack_checkpoint.py` writes packed
checkpoints.

May import profiles, homes/options, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system.
"""
