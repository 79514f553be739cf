"""Expert computation: tensors in, tensors out. May import system."""
