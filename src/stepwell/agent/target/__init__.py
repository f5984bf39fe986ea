"""agent/target."""
