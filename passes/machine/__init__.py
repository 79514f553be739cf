"""Hardware profiles, tables of seconds, and the times of layers and transfers on a machine. Imports no other room."""
