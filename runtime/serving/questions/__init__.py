"""Texts and questions become requests of tokens, and answers become probabilities; knows no HTTP.

May import serving/batching, serving/requests.
"""
