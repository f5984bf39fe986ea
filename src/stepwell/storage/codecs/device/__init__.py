"""Coding on a GPU, to the same bytes as on the host.

device_coder    quantises parameters before they are copied to the host
first_pass      which groups changed, and their tables
kernels         the Triton kernels
kernel_tables   their arguments and results
tiles           how a part is cut up for them
thinning        marks and values, on the device
"""
