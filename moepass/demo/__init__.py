"""`moepass demo`: streamed experts compared with plain PyTorch, and one decision over HTTP.

Start reading at `comparison.py`.

May import explaining, the face.
"""
