"""The HTTP server: the application with all routes, the routes about the server itself, the socket.

May import serving/routes, serving/questions, serving/batching, serving/requests.
"""
