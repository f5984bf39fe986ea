"""tools/cli/scr."""
