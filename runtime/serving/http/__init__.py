"""The HTTP server: the application with all routes, routes about the server itself, and limits on connections.

Start at `app.py`; the routes that ask the model are in `serving/routes`.

May import serving/routes, serving/questions, serving/batching, serving/requests.
"""
