"""System: processes, threads, memory pages and shared memory, through the operating system alone.

Imports no other folder.
"""
