"""Reading of checkpoints: config, weights, tokenizer and prompt. Start at `checkpoint_folders.py`.

May import sizes, demo.
"""
