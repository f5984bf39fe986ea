"""ranks/line."""
