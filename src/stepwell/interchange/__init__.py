"""Checkpoints for other tools: what the tree of a record says, and files that stock safetensors and torch open.

`outline` reads the tree without torch, `safetensors_file` and `torch_file` are the two things a checkpoint can be
exported to, `plain` makes a state readable for `torch.load(weights_only=True)`.
"""
