"""A private, consistent copy of the state at one step, taken while training goes on.

`plan` says where each leaf goes, `pool` owns the slots, `guard` notices changes, `host` and `device` copy,
`inflight` is one snapshot under way, `snapshotter` the sequence of it all, `stream` the way without memory.
"""
