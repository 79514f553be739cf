"""Prompts and questions as requests of tokens, and answers as probabilities; independent of HTTP.

Start at `request_tree.py` for requests, and at `question_tree.py` for questions with options.

May import serving/batching, serving/requests.
"""
