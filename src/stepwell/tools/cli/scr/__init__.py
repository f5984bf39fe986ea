"""Tools of the SCR interface.

dataset_index   `index`: the datasets in a prefix
halt            `halt`: tells a job when to stop
scavenge        `scavenge` and `flush`: datasets from the caches into the prefix
"""
