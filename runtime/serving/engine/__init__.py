"""One rank: requests in, answers out, step by step, through a compiled model.

May import serving/attention, serving/cache, serving/batching, serving/requests, offload, homes/registry, banks.
"""
