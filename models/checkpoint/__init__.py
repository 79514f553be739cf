"""Reading of checkpoints: config, weights, tokenizer. Start at `checkpoint_folders.py`.

May import sizes, demo, layouts.
"""
