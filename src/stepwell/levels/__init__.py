"""Where copies of a checkpoint live: this node, other nodes, the shared location.

level_spec        what the user asks for: `Node`, `Shared`, `Pairs`, `Xor`, ...
assignments       what the agent gets of it
node_map          which ranks share a node
first_level       whether the node or the shared location comes first
cached            what a node's cache holds of a run
inventory         who holds what of which checkpoint
level_verdict     rank 0's verdict on a checkpoint
cache_retention   what may go from a cache
spilled_parts     parts of ranks whose node could not hold them
protect           redundancy across nodes
peers             files of one node for another
"""
