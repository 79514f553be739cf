"""What asks a server: requests from a file with `moepass batch`, measured ones with `moepass bench`.

Imports no other room.
"""
