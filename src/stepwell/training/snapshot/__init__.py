"""A private, consistent copy of the state at one step, taken while training goes on.

snapshotter    the sequence of a snapshot
arrange        roles, layout and program of a state, kept while the state looks the same
layout         where each leaf lies in a slot
program        what has to be copied, and by whom
strategy       beside training, by way of the device, or blocking
snapshot_options  what the user chose for snapshots
slots          memory for snapshots: how much, which slot is free
beginning      copies what may change now, and queues the rest
inflight       one snapshot under way, up to its verdict
guard          notices a leaf that changed while it was copied
quiet_moment   a moment in which the main thread runs no torch operation
host_copy      copies by the host, and the thread that finishes snapshots
device_copy    copies of CUDA leaves on a side stream
streamed       a blocking save through small chunks, for hosts without memory for a slot
coded          parameters quantised on the device instead of copied
digests        digests of leaves, taken while training goes on
record_size    how large the record will be
refusal        a state that cannot be saved
"""
