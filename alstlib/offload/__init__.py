"""Activation checkpoints that are kept on the host (ALST, section 3.3).

In the order in which to read it: `checkpoints` recomputes a function from its input; `host_store` keeps inputs;
`courier` copies them, or parts of other tensors, to the device and back; `headroom` measures what a device has left.
"""
