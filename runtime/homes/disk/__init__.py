"""Experts that stay in files, and are read into slots. May import homes and what homes may."""
