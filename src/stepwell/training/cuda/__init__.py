"""training/cuda."""
