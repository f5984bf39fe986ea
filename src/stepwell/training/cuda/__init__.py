"""Calls into CUDA that torch does not offer.

runtime      the runtime library, by ctypes
copy_graph   many copies as one launch
ticks        how long iterations take, by the device's clock
"""
