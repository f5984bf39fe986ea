"""agent/files."""
