"""The command line, and the streams that it reads and writes.

May import clients, demo, explaining, the face.
"""
