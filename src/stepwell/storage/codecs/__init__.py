"""Codes for what changes between checkpoints, lossless and lossy. Pure coding, no files.

codec_spec      the codecs and their options
assignment      which leaf gets which codec, by its role (`Deltas`)
floats          bits of float32
histogram       what the differences of a group are like
tables          quantiser tables
quantise        differences to symbols
coding_groups   the groups of a part
parts           a part as bytes: tables, symbols, exact groups
precoded        a part that was coded on a device
sparse          marks and values: bytes of which few are not zero
huffman         Huffman codes, as in the LC-Checkpoint paper
zstd_frames     zstd with a known size
lossless        `raw`, `zstd`, `xor`, and `top`
signature       the digest of a state, as sums
device          the same on a GPU
"""
