"""Batches and where in the data the run is. Knows nothing of checkpoints."""
