"""The agent: one small process per rank that turns complete snapshots into checkpoints and outlives the trainer.

`process` is its main loop, `queue` what it still has to do, `persist` one snapshot's way to the disk, `writer` the
bytes. `client` is the trainer's end. Nothing here imports torch.
"""
