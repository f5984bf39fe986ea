"""The files and objects of a run, and nothing about tensors.

files               the durable operations everything is made of
objects             the same for a bucket
paths               every name in a run directory
no_follow           opens below a directory without following links
private_directory   directories that nobody else can change
commit              the order in which a checkpoint begins to exist
assemble            one commit for all ranks
catalog             which checkpoints are there, and in which state
lineage             which history is true
retention           which checkpoints may go
spare               the shard file of a removed checkpoint, used for the next one
progress            how far the trainer got
learned             what a run learned about itself: failures, costs
known               what this process has read once
mirror              files of a run in a bucket that are kept on this machine
node_id             the id of a node, in its cache
nodes_mark          how far the nodes are ahead of the shared location
run_secret          where the secret of a run is kept
mounts              what kind of file system a path lies on
blocks              a file block by block, compared with its record
background          threads that work beside training: priority, and when to try again
parallel_reads      many small reads at once
passing_errors      errors that pass: a server restarts, descriptors are short
"""
