"""Who belongs to a run: its secret, and how two processes prove that they know it.

    secret     draws the secret and derives keys
    keyfile    a secret in a file that only its user can read
    greeting   the proof at the start of a connection, in both directions
    seal       authenticates every frame after that

One mechanism for all connections of a run.
"""
