"""Parts of `benchmarks/peers.py`: the training loop, one row per peer, the children that run them, and the report.

workload -> rows -> trainer, restorer (children, one process each) -> conductor (parent) -> report
limits: what disk and memory allow; procs: memory and CPU of a child with all its helpers; disk: files and caches
"""
