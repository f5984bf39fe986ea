"""tools/cli/commands."""
