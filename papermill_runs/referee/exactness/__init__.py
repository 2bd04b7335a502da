"""The referee: whether a stack's sequence parallelism trains as plain transformers does in one process.

`cases.py` has the table of cases, `stacks/` one file for each stack and the versions of its packages, `ring.py` and
`flash.py` what stands in for CUDA's attention, `training.py` what a rank does, `ranks.py` the
processes, `judge.py` the verdict and the module that differs first, `page.py` the pages and the reproducers.
"""
