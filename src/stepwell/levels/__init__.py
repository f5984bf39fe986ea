"""Checkpoints on several levels: what ranks hold for each other, so that a lost node costs no checkpoint."""
