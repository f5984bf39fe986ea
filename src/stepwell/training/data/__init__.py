"""Batches and where in the data the run is. Knows nothing of checkpoints.

batches         `ckpt.data`: counts what the loop used, and starts again at any batch
source_choice   finds the source behind what the user gave as `data=`
source          a torch DataLoader or a list, opened at any position
loader          `stepwell.DataLoader`
stateful        sources with `state_dict` and `load_state_dict`
replayed        sources that must be read again from the start of the epoch
sampler         samplers that begin at any batch of any epoch
cut             positions in an epoch as batches: sizes, ranks, the tail (arithmetic)
permutation     the order of an epoch as a function
augment         randomness that belongs to a sample
cursor          where in the data the run is
steps           what counts as a step
usage           which of the delivered batches the loop has used
refusals        ways to read the data that cannot be resumed, and what to do instead
"""
