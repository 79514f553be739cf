"""Measurements on real ranks with the layers of other projects."""
