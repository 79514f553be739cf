"""Requests and answers in tokens and numbers: plain records that every other serving package reads.

Start with `request.py` and `answer.py`. `backend.py` is the protocol between the HTTP routes and the ranks.

Imports no other folder.
"""
