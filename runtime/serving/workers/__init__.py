"""Ranks as processes of their own, and the messages between them and the frontend.

Start at `frontend.py` for the side of the server, and at `rank_loop.py` for the side of a rank.

May import serving/engine, serving/router, serving/batching, serving/requests, ranks, system.
"""
