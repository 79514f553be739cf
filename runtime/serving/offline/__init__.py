"""Scoring of many texts against one set of labels, read as a stream, with an engine in this process.

Start at `text_scorer.py`.

May import serving/engine, serving/questions, serving/batching, serving/requests, offload, homes/options, transfer.
"""
