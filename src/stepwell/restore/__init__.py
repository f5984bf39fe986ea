"""Bringing a run back: what is there, which one, every byte checked on its way into the live state.

`plan` chooses, `read` delivers verified bytes from a file or from the arena, `load` puts them into torch objects.
"""
