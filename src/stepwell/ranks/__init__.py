"""Several processes as one run: who is there, who stores what, and when all of them checkpoint.

member          the other ranks, as the training process sees them
agreement       all ranks checkpoint the same step, and no step waits for it
asked_saves     saves that not every rank asked for
share_rounds    the rounds in which ranks agree who stores what
claims          what a rank says about its leaves
sharing         which rank stores which part (arithmetic)
share_verdict   what a rank learns of that
rank_sets       sets of ranks, and who of a set stores what
groups          torch.distributed, MPI, Horovod, or one process
line            messages between ranks at any time
wire            the run's secret, and what is proved with it
"""
