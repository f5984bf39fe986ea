"""The processes of one run, and what they say to each other.

`choose` finds the group that the user's framework has set up. `group` is what all of them can do, over `local`,
`distributed` (torch), `mpi` or `horovod`: everybody takes part, everybody waits; `consent` is what becomes of errors
there. `line` is for messages at any time, which nobody waits for; it stands on `wire` (bytes on a connection) and
`meet` (who may connect, and where).
"""
