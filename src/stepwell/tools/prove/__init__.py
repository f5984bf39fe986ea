"""`stepwell prove`: run the user's own script once uninterrupted and once under SIGKILLs, and compare every bit.

trial    the sequence of it all: reference, kills, restarts, comparison
moments  when to kill, and whom; `ranks` who is there
command  the user's command as a set of processes: started, killed, never left behind
history  what a run's events say: restores, snapshots, commits, logged values
compare  the two final checkpoints, tensor by tensor and value by value; `logs` what was logged, step by step
proof    the facts and the verdict that follows from them
"""
