"""The demo checkpoint: a small model that names the language of a short text. Imports no other folder."""

from pathlib import Path


def demo_folder() -> Path:
    """Return the folder of the checkpoint."""
    return Path(__file__).parent
