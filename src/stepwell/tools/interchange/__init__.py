"""Checkpoints as files and folders that stock libraries open.

reading            whole tensors, put together from all ranks and verified
merged             one tree for a checkpoint of many ranks
outline            the tree without torch
plain              a state that `torch.load(weights_only=True)` reads
numbers            numbers without NumPy and torch
comparison         two checkpoints side by side
new_file           a file that is there whole or not at all
safetensors_file   one safetensors file
torch_file         one file for `torch.load`
hf_folder          a Hugging Face folder
dcp_folder         a folder for torch.distributed.checkpoint
dcp_state          the keys DCP gives to a state dict
"""
