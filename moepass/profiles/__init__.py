"""Where hardware profiles come from."""
