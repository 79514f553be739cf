"""Processes, threads, pages and shared memory: the operating system only. Imports no other room."""
