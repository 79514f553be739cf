"""Stored captures: what capture, passes, cutting and compiling gave for a model, on disk for the next process.

May import execute, lowering, banks, transfer, system.
"""
