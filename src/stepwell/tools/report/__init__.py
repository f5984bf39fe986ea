"""Pictures of a run, drawn from its event file.

story     what happened and when: lineages, iterations, stalls, snapshots, commits, restores
timeline  the story as a PNG (needs matplotlib, the extra `plot`)
"""
