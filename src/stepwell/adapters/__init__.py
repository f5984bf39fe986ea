"""What other frameworks need to be checkpointed, one module each."""
