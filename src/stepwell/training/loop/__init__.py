"""The loop around a checkpoint. `checkpointer.py` wires these together.

options          checks the Checkpointer's options
run_state        stepwell's own part of the state: step, position, generators, pending gradients
iteration        ends an iteration, an epoch and the run
schedule         when to save: policies, what they look at, what the run learned
save             one save: state, snapshot, agent
deferred_save    a save asked for in the middle of a step waits for its end
late_changes     what the loop changed after a save
outcomes         what became of each snapshot
mailbox          what other threads tell the training thread
reactions        what this process does when other ranks, or its agent, tell it something
save_handle      `SaveHandle`, and the futures behind it
completion       completes futures outside of locks
overdue          warns when checkpoints are due and none is committed
preemption       signals and notices that tell the run to leave
ending           how a run ends: closed, told to leave, by an error, with the interpreter
forked_child     a forked child does nothing to its parent's run
waits            waits with a deadline
"""
