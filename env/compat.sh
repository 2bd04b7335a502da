#!/usr/bin/env bash
# The support matrix on the newest and the oldest transformers that are supported, side by side; called by
# `make test-compat`. What it measured goes to papermill_runs/results/support, and from there into the table of notebooks/training.md.
# With `sweep` as its first argument: the sweep over all types of models and its table; called by `make sweep`.
# With `trainer`: what stands on the Trainer, with the oldest versions of the libraries around it; `.ci/run` asks for it.
# The older transformers is installed beside the environment, into .compat (ignored), and changes nothing in it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
oldest=5.17.0
folder=.compat/$oldest
if [ "${1:-}" = trainer ]; then
    around=.compat/trainer
    old=("transformers==$oldest" "huggingface-hub<2" "trl==1.9.0" "accelerate==1.12.0" "peft==0.18.0")
    if [ ! -d "$around/trl" ]; then
        echo "[compat] installing ${old[*]} into $around" >&2
        # most of it is never imported: nothing is compiled that is not
        if ! .venv/bin/python -m pip install -q --no-compile --no-deps --target "$around.part" "${old[@]}"; then
            echo "[compat] they cannot be installed here: NOT TESTED" >&2
            exit 0
        fi
        mkdir -p .compat && mv "$around.part" "$around"
    fi
    export PYTHONPATH=$PWD/$around OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1
    exec .venv/bin/python -m pytest tests/trainers/test_trainer.py tests/trainers/test_sft_trainer.py \
        -k "test_two_ranks and (ddp or zero3 or text)" "${@:2}"
fi
export ALST_SUPPORT_OUT=$PWD/papermill_runs/results/support OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1
if [ ! -d "$folder/transformers" ]; then
    echo "[compat] installing transformers $oldest into $folder" >&2
    .venv/bin/python -m pip install -q --no-deps --target "$folder.part" "transformers==$oldest" "huggingface-hub<2"
    mkdir -p .compat && mv "$folder.part" "$folder"
fi
status=0
for path in "" "$PWD/$folder"; do
    PYTHONPATH=$path .venv/bin/python -c 'import transformers; print("[compat] transformers", transformers.__version__)'
    if [ "${1:-}" = sweep ]; then
        PYTHONPATH=$path .venv/bin/python -m tests.sweep.drive --keep "${@:2}" || status=$?
    else
        PYTHONPATH=$path .venv/bin/python -m pytest tests/test_matrix.py tests/hf/test_support.py tests/hf/test_in_use.py tests/hf/test_attach.py \
            tests/linear/test_mixers.py::test_hybrids_are_exact "$@" || status=$?
    fi
done
if [ "${1:-}" = sweep ]; then
    .venv/bin/python -m tests.sweep.table
elif [ "$status" -eq 0 ]; then
    .venv/bin/python tests/support_table.py
fi
exit "$status"
