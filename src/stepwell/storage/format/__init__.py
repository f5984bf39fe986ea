"""Bytes and records of a checkpoint: pure functions, no files.

`shard` lays tensors out as a safetensors file, `tree` writes plain values as typed JSON, `record` says what one
rank contributed, `manifest` is the commit record, `checksum` guards all of them. `docs/format.md` is the contract.
"""
