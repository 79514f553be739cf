"""The demo checkpoint: a small mixture-of-experts model that names the language of a short text."""

from pathlib import Path


def demo_folder() -> Path:
    """The folder of the checkpoint, as `from_pretrained` takes it."""
    return Path(__file__).parent
