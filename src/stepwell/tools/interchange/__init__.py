"""Checkpoints for other tools, of one rank or of many: files and folders that stock libraries open.

`reading` puts whole tensors together from the records of all ranks, `outline` reads the tree without torch, `compare`
holds two checkpoints side by side. A checkpoint can be exported to `safetensors_file`, `torch_file` (`plain` makes a
state readable for `torch.load(weights_only=True)`), `hf_folder` and `dcp_folder`; `dcp_state` has it under DCP's keys.
"""
