"""Tools for people.

cli           the command line
prove         kill and restart a script, compare every bit
report        pictures of a run
interchange   checkpoints as files of other libraries
"""
