"""Processes, threads, memory pages and shared memory, by the operating system alone. Imports no other folder."""
