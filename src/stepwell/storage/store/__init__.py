"""Files of a run on a POSIX file system, and nothing about tensors.

`files` holds the durable primitives, `paths` the names, `lineage` the histories, `catalog` what is there,
`commit` the order in which a checkpoint begins to exist, `retention` how it ends, `progress` how far a trainer got.
"""
