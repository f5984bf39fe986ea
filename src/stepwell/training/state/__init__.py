"""What is saved: live objects, flattened to named leaves and a tree of plain values.

    tracked       the user's objects
    capture       their state at each save; what did not change is not looked at twice
    flatten       state trees to leaves and back
    roles         how each leaf may be copied, and what it is
    shards        tensors of which this process holds a part
    share         what this rank stores of the state it holds
    strides       how the elements of a tensor lie in memory
    rng           random generators: Python, NumPy, torch, CUDA
    gradients     gradients that wait for their optimizer's step
    settings      what the script set before the restore
    fingerprint   whether the state changed between two moments
    device_sums   digests of tensors on a device, without waiting for it
    untracked     optimizers that step without being tracked

Nothing here copies tensor data.
"""
