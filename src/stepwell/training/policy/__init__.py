"""When to checkpoint. A policy sees counts and durations and answers "now?"; it knows nothing of tensors or files."""
