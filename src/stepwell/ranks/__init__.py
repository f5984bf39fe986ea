"""Several processes as one run: which rank stores what, and when all of them checkpoint.

`sharing` is arithmetic, `agreement` talks over the line of `groups`. Neither holds a step up.
"""
