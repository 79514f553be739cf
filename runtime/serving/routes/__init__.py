"""The families of routes, one file each: what their clients send, the tree that it asks, the reply and its errors.

May import serving/questions, serving/batching, serving/requests.
"""
