"""Where the time went: profiles of msprof, torch_npu and torch, read without torch.

Files are streamed and times sorted outside of memory, so that a profile of any size can be read.
"""
