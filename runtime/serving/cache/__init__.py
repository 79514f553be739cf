"""The cache of prefix blocks: keys and values of tokens that several requests share.

Start with `block_index.py`, which decides which blocks to keep. `block_memory.py` holds their keys and values,
`block_scores.py` the scores of their tokens.

May import serving/requests, serving/batching.
"""
