"""The cache of prefix blocks: keys and values of tokens that several requests share.

Start with `block_index.py`, which decides which blocks to keep. `block_memory.py` holds their keys and values.

May import serving/requests, serving/batching.
"""
