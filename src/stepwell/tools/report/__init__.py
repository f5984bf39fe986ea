"""Pictures of a run, drawn from its event file.

story      what happened, and when
axis       time, with restarts cut short
timeline   the picture
"""
