"""Codes for what changes between checkpoints, lossless and lossy, and the chain of records made of them.

`spec` names the codecs and their options, `layout` says which leaf gets which one by its role. A codec of bytes is in
`lossless`. A codec of differences goes `histogram` (what the differences are like) -> `tables` (which of them get a
symbol, and what it stands for) -> `quantise` (symbols out, reader's state updated) -> `groups` (what came of it) ->
`frames` or `huffman` (symbols to bytes, in `parts`, by `sparse` where most are zero). `device`, `thinning` and
`kernels` do the same up to the symbols on a GPU, to the same bits, and `device_moving` applies records there; they
alone import torch and triton. `image` holds the reader's state, `signature` makes its digest, `coder` a record's
sections, `record` its bytes, `segment` a file of records; `chain` writes a chain and `replay` reads it, with `moving`,
which applies many records at once, by the threads of `crew`. `docs/format.md` has the bytes.
"""
