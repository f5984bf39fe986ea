"""The command line: one module per command, loaded when it is used, and never torch (but in `export --format torch`).

`main` holds the table of commands; `locate` finds the run and the checkpoint a person means, `survey` and `liveness`
tell how these are, `output` and `wording` print.
"""
