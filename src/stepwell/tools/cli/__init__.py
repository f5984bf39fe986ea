"""The command line. A command's module is loaded when it is used; only `export` to torch formats loads torch.

main          the table of commands
locate        which run and which checkpoint a person means
survey        a quick look at every checkpoint
liveness      whether anybody works on a run
decisions     `show --policy`
chain_reach   what the chains of a run reach
node_caches   what the caches of the nodes hold, as far as this machine can tell
output        tables for people, JSON for scripts
wording       sizes, ages, counts
commands      one module per command
scr           the tools of the SCR interface
"""
