"""Several processes as one run: which rank stores what, and when all of them checkpoint.

`claims` -> `sharing` -> `verdict` is arithmetic: what the ranks hold, who stores what, which rows one of them stores.
`agreement` and `asked` talk over the line of `groups`. None of them holds a step up.
"""
