#!/usr/bin/env bash
# Puts Liger and Triton into .compat/liger (ignored, 700 MB), beside the environment, which it leaves as it is: a CPU has
# no use for them but the tests, which run Liger's kernels in Triton's interpreter (tests/cuda/test_liger.py). Called by
# `make release`. Where they cannot be had it says so, and those tests are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
liger=$(sed -n 's/^liger_kernel==//p' env/cuda-py311.txt)  # the version that runs on GPUs
triton=3.7.1  # the version that these tests were written with
folder=.compat/liger
if [ "$(cat "$folder/versions" 2>/dev/null)" = "$liger $triton" ]; then exit; fi
echo "[liger] installing liger-kernel $liger and triton $triton into $folder" >&2
rm -rf "$folder" "$folder.part"
if .venv/bin/python -m pip install -q --no-deps --target "$folder.part" ${WHEELHOUSE:+--no-index --find-links "$WHEELHOUSE"} \
    "liger-kernel==$liger" "triton==$triton"; then
    echo "$liger $triton" > "$folder.part/versions"
    mv "$folder.part" "$folder"
else
    rm -rf "$folder.part"
    echo "[liger] they cannot be had here: the tests of Liger's kernels are skipped" >&2
fi
