"""Attention on one device. It returns its logsumexp too, so that parts can be merged and nothing runs forward twice.

In the order in which to read it: `rule` says what a call is told, and what its backward needs; `attention` computes
documents, windows, sinks and row chunks over any kernel, from the calls that `spans` cuts them into; `calls` hands one
call to a kernel, in parts where it is too large; `backends` has the kernels (PyTorch's, flash-attn's in
`flash_packages`, `blockwise` in plain PyTorch) and chooses one; `user_attention` makes one of a function that the user
gives.
"""
