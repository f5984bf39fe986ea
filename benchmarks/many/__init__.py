"""The parts of many_ranks.py: each runs the real code with many ranks in a few processes."""
