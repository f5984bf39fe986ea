"""training/loop."""
