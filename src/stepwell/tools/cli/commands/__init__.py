"""One module per command.

ls                 the checkpoints of a run
show               one checkpoint: tree, shapes, sizes
why                which checkpoint a restart would use
diff               two checkpoints side by side
verify             reads and checks every byte
export             a checkpoint as a file of another library
prune              retention by hand
clean              removes leftovers of interrupted saves
prove_command      `prove`
rendezvous_store   `store`: the store of a job with spares
"""
