"""The processes of a run, and what they agree on together: everybody takes part, everybody waits.

group          what every group can do
detect         finds the group that the user's framework has set up
local          one process
torch_group    torch.distributed, over its key-value store
mpi            MPI, by mpi4py
horovod        Horovod
store_rounds   one round in a key-value store
joined         what all ranks said, as one value
consent        one rank's error becomes everybody's
group_key      the run's key on all ranks
"""
