"""Activation checkpoints that are kept on the host (ALST, section 3.3), and a ledger of the bytes on device and host.

In the order in which to read it: `checkpoints` recomputes a function from its input; `storage` says what a place for
inputs can do, and `host_store` is one; `courier` copies parts of tensors to the device and back; `ledger` counts bytes;
`headroom` measures what a device has left.
"""
