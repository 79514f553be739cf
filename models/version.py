"""The version of this package, in a module without imports, so that any part can report it."""

__version__ = "0.1.0"
