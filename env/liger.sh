#!/usr/bin/env bash
# Puts Liger and Triton into .compat/liger (ignored, 700 MB), beside the environment, which it leaves as it is: a CPU has
# no use for them but the tests, which run Liger's kernels in Triton's interpreter (tests/cuda/test_liger.py). Called by
# `make release`. Where they cannot be had it says so, and those tests are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pins=papermill_runs/referee/exactness/stacks/liger.txt  # Liger's version is that of the lock for GPUs
folder=.compat/liger
if cmp -s "$pins" "$folder/versions"; then exit; fi
echo "[liger] installing $(tr '\n' ' ' < "$pins")into $folder" >&2
rm -rf "$folder" "$folder.part"
if .venv/bin/python -m pip install -q --no-deps --target "$folder.part" ${WHEELHOUSE:+--no-index --find-links "$WHEELHOUSE"} \
    -r "$pins"; then
    cp "$pins" "$folder.part/versions"
    mv "$folder.part" "$folder"
else
    rm -rf "$folder.part"
    echo "[liger] they cannot be had here: the tests of Liger's kernels are skipped" >&2
fi
