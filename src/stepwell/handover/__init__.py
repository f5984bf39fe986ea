"""Shared memory that outlives the trainer, and the socket over which it changes hands.

`memory` is the arena: anonymous pages, a header, slots. `channel` carries messages and file descriptors.
"""
