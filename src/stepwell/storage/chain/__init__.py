"""storage/chain."""
