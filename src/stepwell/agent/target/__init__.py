"""Where a snapshot goes, and what the agents of all ranks agree on there.

shared_target     the shared location: part, record, manifest, retention
node_target       this node's cache, with redundancy on other nodes
redundancy        what this rank holds for others
answers           what this rank says to the agents of other ranks
hearing           who asks whom about each checkpoint
rank0_decisions   what rank 0 decided, as this node keeps it
spill             this rank's part in the shared location while its node cannot hold it
flush             copies whole checkpoints from the caches to the shared location
marker            writes down there how far the nodes are
peer_door         serves the agents of other nodes
chunks            a save that comes in small chunks
"""
