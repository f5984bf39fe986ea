"""levels/protect."""
