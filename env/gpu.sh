#!/usr/bin/env bash
# Everything that only a GPU can tell, in order of worth, each with its own time limit; a failure does not end the rest.
#   env/gpu.sh OUT            all of it, about 40 minutes on one H100
#   env/gpu.sh OUT tests gpu-kernels gpu-rank-of-8      only these, in this order
# Each spec's results go to OUT/SPEC/ROW/result.json: copy what is worth keeping to papermill_runs/results/SPEC/.
# PYTHON names the interpreter (default .venv/bin/python), which needs papermill and ipykernel.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?a folder for the results}; shift
python=${PYTHON:-.venv/bin/python}
if [ $# -eq 0 ]; then
  set -- tests gpu-kernels gpu-rank-of-8 gpu-500k gpu-1m gpu-offload gpu-peers gpu-ablation
fi
mkdir -p "$out"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
summary=()
for what in "$@"; do
  began=$SECONDS
  if [ "$what" = tests ]; then
    timeout 600 "$python" -m pytest -m gpu -q -rfE 2>&1 | tee "$out/tests.log"
  else
    timeout 620 "$python" -m alstlib.cli run "papermill_runs/specs/$what.yaml" --out "$out/$what" \
      2>&1 | tee "$out/$what.log"
  fi
  code=${PIPESTATUS[0]}
  summary+=("$what: exit $code after $((SECONDS - began)) s")
done
printf '%s\n' "${summary[@]}" | tee "$out/summary.txt"
