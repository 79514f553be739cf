"""Many texts against one set of labels, read as a stream and scored through the engine of this process.

May import serving/engine, serving/questions, serving/batching, serving/requests, offload, homes/registry, transfer.
"""
