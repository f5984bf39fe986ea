"""Who belongs to a run: its secret, how two processes prove to each other that they know it, and what they say then.

`secret` draws it and derives keys from it; `keyfile` keeps it in a file that only its user can read; `greeting` is the
proof at the start of a connection, in both directions; `seal` authenticates every frame after that. The one mechanism
for all connections of a run: between nodes (`levels`, SCR's server) and between ranks (`ranks/line/line`).
"""
