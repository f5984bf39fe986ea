"""What is saved: live objects, flattened to named leaves and a tree of plain values.

`tracked` holds the user's objects, `flatten` takes their state apart and puts it together, `roles` says how each leaf
may be copied, `rng` covers the random generators. Nothing here copies tensor data.
"""
