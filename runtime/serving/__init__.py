"""Requests become answers: texts are scored against labels. May import execute, offload, ranks."""
