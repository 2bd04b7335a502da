"""The command line, sweeps and single runs, and the files that they write. These do not import torch; the workers that
they start (`train`) do, and what reads a user's files for them (`corpus`).

In the order in which to read it: `results` is `result.json`; `launch` starts one run (with `processes`, `locks` and
`progress`) and always ends with a result; `workers` says which fields a worker has; `sweeps` are the specs; `cli` is
the command `alst`, with `status`, `report` and `verify`. `spawn` runs a function on a few CPU ranks, for a notebook.
"""
