"""What runs in the trainer, in the order of an iteration.

data       batches, and where in the data the run is
loop       what ends an iteration, when to save, how a run ends
policy     how often to checkpoint
state      what is saved: live objects as named leaves and plain values
snapshot   a private copy of the state, taken while training goes on
cuda       calls into CUDA that torch does not offer
"""
