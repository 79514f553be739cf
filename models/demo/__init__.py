"""The demo checkpoint: a small model that names the language of a short text. Imports no other room."""

from pathlib import Path


def demo_folder() -> Path:
    """The folder of the checkpoint, as `from_pretrained` takes it."""
    return Path(__file__).parent
