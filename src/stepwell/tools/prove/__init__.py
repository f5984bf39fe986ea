"""`stepwell prove`: runs the user's script once uninterrupted and once under SIGKILLs, and compares every bit.

trial           the sequence: reference, kills, restarts, comparison
moments         when to kill, and whom
command         the user's command as a set of processes
rank_facts      the ranks of a run
trial_facts     what the events of a run say
final_states    compares the final states
logged_values   compares the logged values
proof           the verdict
"""
