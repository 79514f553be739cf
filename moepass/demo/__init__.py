"""What `moepass demo` shows: streamed experts against plain PyTorch, and one decision over HTTP.

May import explaining, the face.
"""
