"""Bringing a run back: what is there, which one, every byte checked on its way into the live state.

`plan` chooses, `read` verifies blocks of a file or of the arena, `place` puts them into tensors, `load` gives these to
the objects.
"""
