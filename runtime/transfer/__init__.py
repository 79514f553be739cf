"""Transfer: moves banks from their homes into the slots of a ring.

A copy (`copying`) reads sources and fills a slot on a lane (`lanes`): a thread on a CPU, a stream on CUDA. The copier
starts copies and waits for them; the ring decides when. Start reading at `ring`, then `copier` and `copying`.

May import kernels, system.
"""
