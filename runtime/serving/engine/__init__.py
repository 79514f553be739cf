"""The engine of one rank: it turns requests into steps of a compiled model, and their outputs into answers.

Start with `model_engine.py` for a step, and `load_engine.py` for the way from a checkpoint to a warm engine.

May import serving/attention, serving/cache, serving/batching, serving/requests, offload, homes/options, banks, system.
"""
