"""Agreement between ranks, and detection of ranks that are lost.

Start with README.md, then `rendezvous.py` (records exchanged through a store) and `agree.py` (topics that must be
equal on all ranks).

May import system.
"""
