"""levels/peers."""
