"""Requests become answers; each part of that is a room of its own. Imports no other room."""
