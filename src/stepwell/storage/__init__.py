"""Bytes at rest.

format   records, manifests and shards: pure functions, no files
store    the files and objects of a run, and the order of a commit
codecs   codes for what changes between checkpoints
chain    an exact base and the lossy records after it
"""
