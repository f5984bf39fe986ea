"""The agent: one small process per rank that turns complete snapshots into checkpoints and outlives the trainer.

    process         the main loop: listens to the trainer, lingers when it dies
    pending         one snapshot on its way: what it is for, how far it is
    queue           snapshots in the order they were taken
    streaming       saves through small chunks, while the trainer waits
    worker          the thread that persists, reports and prunes
    chainer         the thread that codes lossy deltas
    offer           what a lingering agent offers a successor
    callers         successors that ask for the memory of a dead trainer
    trainer_watch   the trainer, seen through a pidfd
    target          where a snapshot goes: the shared location, the node, a flush
    files           bytes to files

Nothing here imports torch.
"""
