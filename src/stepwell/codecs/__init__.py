"""Codes for what changes between checkpoints, lossless and lossy, and the chain of records made of them.

`spec` names the codecs and their options, `layout` says which leaf gets which one by its role. A codec of bytes is in
`lossless`. A codec of differences goes `histogram` (what the differences are like) -> `tables` (which of them get a
symbol, and what it stands for) -> `quantise` (symbols out, reader's state updated) -> `frames` or `huffman` (symbols to
bytes). `image` holds the reader's state, `record` the bytes of one record, `segment` a file of records; `chain` writes
a chain and `replay` reads it. No torch here. `docs/format.md` has the bytes.
"""
