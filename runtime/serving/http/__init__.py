"""The HTTP API: one file per family of routes; the only room that knows FastAPI.

May import serving/questions, serving/batching, serving/requests.
"""
