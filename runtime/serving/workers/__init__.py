"""Ranks as processes of their own, and the messages between them and the frontend.

May import serving/engine, serving/router, serving/batching, serving/requests, ranks, system.
"""
