"""Measurements of activation memory."""
