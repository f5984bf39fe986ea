"""Interfaces of other systems, as thin layers over the public names of stepwell.

checkfreq    CheckFreq: CFManager, CFIterator, CFCheckpoint
scr          SCR: the functions of `scr.py`
names        the module names that unchanged CheckFreq and SCR scripts import
dcp          torch.distributed.checkpoint reads our checkpoints, and a run starts from one of its
dcp_writer   torch.distributed.checkpoint saves through us
dcp_commit   the commit behind `dcp_writer`
dali         NVIDIA DALI as a data source
fsdp1        the part of an FSDP1 model that this rank holds
world        how many ranks there are, and which one this is
"""
