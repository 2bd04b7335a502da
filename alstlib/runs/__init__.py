"""The command line, sweeps and single runs, and the files that they write. This folder does not import torch.

In the order in which to read it: `results` is `result.json`; `launch` starts one run (with `processes`, `locks` and
`progress`) and always ends with a result; `workers` says which fields a worker has; `sweeps` are the specs; `cli` is
the command `alst`, with `status`, `report` and `verify`. `spawn` runs a function on a few CPU ranks, for a notebook.
"""
