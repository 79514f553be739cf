"""Measurements of expert loops in the styles of other projects, on one device."""
