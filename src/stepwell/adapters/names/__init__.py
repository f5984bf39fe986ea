"""The module names that scripts of CheckFreq and SCR import, for scripts that are not to be changed at all.

    export PYTHONPATH=$(python -m stepwell.adapters.names)

This folder is put on the path; then `import scr`, `from cf_manager import CFManager` and so on find ours. Nothing else
in stepwell imports it.

    cf_checkpoint, cf_iterator, cf_manager   CheckFreq's modules
    scr                                      SCR's module
"""
