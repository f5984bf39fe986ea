"""Bytes and records of a checkpoint: pure functions, no files. `docs/format.md` is the contract.

shard          tensors as a safetensors file
tree           plain values as typed JSON
box            which part of a whole tensor a leaf is
dtypes         element types and their names
record         what one rank contributed to a checkpoint
summary        what the leader needs of a record
manifest       the commit record, its opposite, and the records of a run
parity_entry   what a rank stores for the others of its set
document       JSON that may be damaged or forged
checksum       xxh3 over blocks and records
"""
