"""Attention on one device. It returns its logsumexp too, so that parts can be merged and nothing runs forward twice.

In the order in which to read it: `rule` says what a call is told, and what its backward needs; `attention` computes
documents, windows and sinks over any kernel, from the calls that `spans` cuts them into; `paged` does so over keys in
pages; `backends` has the kernels (PyTorch's, those of flash-attn in `flash`, `blockwise` in plain PyTorch) and chooses
one; `user_attention` makes one of a function that the user gives.
"""
