"""Everything that can happen to a run, as typed records, and the file that keeps them.

run_events        the base record, and what happens to any run: start, snapshot, commit, failure, end
loop_events       the training loop: deferred saves, restarts, how training ended
data_events       the data source
snapshot_events   the copy of the state
restore_events    reading a checkpoint
rank_events       several ranks
level_events      node caches, redundancy and flushes
chain_events      lossy deltas
scr_events        datasets of the SCR interface
journal           writes events from a thread and mirrors them to `logging`
event_file        the file itself: appended by several processes, rotated, read back in order
progress_bar      a bar on stderr for what takes longer than two seconds
"""
