"""Expert computation, and decoders of banks: tensors in, tensors out. May import system."""
