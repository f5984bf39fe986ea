"""The way back: what is there, which checkpoint, every byte verified on its way into the live state.

open_run         opens a run: inventory, plan, verified read, vote, next lineage
open_request     what a start wants of its run
common_setup     what all ranks must have in common
candidates       what a start could resume from, in the order it is tried
preference       which of these comes first
search           tries them until one is right on every rank
behind_nodes     refuses a start that would fall behind the nodes
from_memory      from lingering agents on this machine
from_nodes       from the caches of all nodes
from_disk        from a directory or a bucket
from_chain       from a base and its lossy records
whole            a checkpoint of many ranks as one
needed_records   which records this rank needs
held_files       opens all files before any byte is used
byte_sources     bytes of a file, or of the arena
verified_read    verified blocks
into_tensors     blocks into tensors, also on a GPU
match            which live tensor each leaf goes into
load             the whole way into the live objects
"""
