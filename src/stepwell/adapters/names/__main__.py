"""Prints the folder, for PYTHONPATH."""

from pathlib import Path

print(Path(__file__).resolve().parent)
