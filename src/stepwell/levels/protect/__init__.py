"""Redundancy across nodes: who protects whom, and how a lost shard comes back.

sets               sets of ranks that do not fail together (arithmetic)
protection         what one rank holds for others
effective_scheme   what a scheme comes to on the nodes that are there
copies             copies of shards
erasure            XOR and Reed-Solomon codes
parity             parity of one rank for its set
shard_bytes        a shard as one run of verified bytes
repair             rebuilds a lost shard
discard            drops what was found damaged on this node
"""
