"""When to checkpoint. A policy sees counts and durations, and knows nothing of tensors or files.

every      fixed frequencies
auto       as often as the overhead limit, the storage and the failure rate allow
interval   how much work lies between two checkpoints: the formula and its reasons
profile    what iterations and checkpoints cost, seen lately
account    what one checkpoint took from training
"""
