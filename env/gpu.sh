#!/usr/bin/env bash
# Everything that only a GPU can tell, in order of information: the rows of papermill_runs/specs/gpu-*.yaml and the GPU
# tests, each step in processes of its own with a time limit (env/gpu.py). OUT/page.md is written anew after each step:
# what was expected, what came out, the log. The first three answer in ten minutes: gradients equal to the CPU's, copies
# beside kernels, the planner against the allocator.
#   env/gpu.sh OUT                        all of it (how long it takes on a GPU has not been measured)
#   env/gpu.sh OUT tests gpu-1m           only these, in this order; gpu-kernels/kernels-32K is one step
#   env/gpu.sh OUT --dry-run              every step on a CPU, with a tiny model
#   env/gpu.sh OUT --list                 what would be done
# Each row's result goes to OUT/SPEC/ROW/result.json: copy what is worth keeping to papermill_runs/results/SPEC/.
# PYTHON names the interpreter (default .venv/bin/python), which needs papermill and ipykernel.
set -uo pipefail
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-$here/../.venv/bin/python}" "$here/gpu.py" "$@"
