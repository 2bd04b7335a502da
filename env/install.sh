#!/usr/bin/env bash
# Makes or refreshes .venv; does nothing when it already matches its lock. Called by every `make` target that needs it.
#
#   PYTHON=python3.12     the interpreter to use        ALST_DEVICE=cpu|cuda   the lock to use
#   TORCH_INDEX_URL=...   the index torch comes from    WHEELHOUSE=folder      install offline (env/wheelhouse.sh)
#
# `env/install.sh --plan` only prints what it would use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)
say() { echo "[install] $*" >&2; }
fail() { say "$@"; exit 1; }

# A candidate counts when it runs, can make virtual environments and is at least 3.11. Prints its version, "3 11".
probe() {
    "$1" -c 'import sys, ensurepip, venv; v = sys.version_info; print(v[0], v[1]); sys.exit(v < (3, 11))' 2>/dev/null
}

# The interpreter behind a virtual environment (ours may be the active one), or the interpreter itself.
base() { "$1" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)'; }

choose_python() {
    local candidate version newer=""
    if [ -n "${PYTHON:-}" ]; then
        version=$(probe "$PYTHON") || fail "PYTHON=$PYTHON is ${version:+Python ${version/ /.}, }not a Python >= 3.11" \
            "with the venv and ensurepip modules; set PYTHON to one that is, such as PYTHON=python3.11"
        python=$(base "$PYTHON")
        return
    fi
    for candidate in python3 python3.12 python3.11 python python3.13 python3.14; do
        version=$(probe "$candidate") || continue
        case $version in
            "3 11" | "3 12") python=$(base "$candidate"); return ;;
            *) newer=${newer:-$candidate} ;;
        esac
    done
    [ -n "$newer" ] || fail "no Python >= 3.11 with the venv and ensurepip modules found (Debian and Ubuntu: package" \
        "python3-venv); install Python 3.11 or 3.12, or name one with PYTHON=/path/to/python"
    python=$(base "$newer")
}

choose_device() {
    device=${ALST_DEVICE:-}
    case $device in
        cpu | cuda) ;;
        "") case $(nvidia-smi -L 2>/dev/null || true) in *GPU*) device=cuda ;; *) device=cpu ;; esac ;;
        *) fail "ALST_DEVICE=$device is not one of cpu, cuda" ;;
    esac
}

choose_python
choose_device
version=$(probe "$python")
case $version in
    "3 11") tag=py311 ;;
    "3 12") tag=py312 ;;
    *) tag=py312; say "warning: Python ${version/ /.} is newer than the locks; trying those of Python 3.12" ;;
esac
lock=env/$device-$tag.txt
target="$lock Python ${version/ /.} in $root"
hash=$(cat "$lock" pyproject.toml env/install.sh | git hash-object --stdin | cut -c 1-12)
stamp=.venv/.installed-$hash
if [ "${1:-}" = --plan ]; then
    echo "python=$python lock=$lock stamp=$stamp"
    exit
fi

# A .venv for another device, Python or place is remade. One without a mark, made by hand, is used as it is.
if [ -e .venv ] && { [ ! -x .venv/bin/python ] || [ "$(cat .venv/.target 2>/dev/null || echo "$target")" != "$target" ] \
    || [ "$(probe .venv/bin/python)" != "$version" ]; }; then
    say "remaking .venv, which does not fit $target"
    rm -rf .venv
fi
if [ -e "$stamp" ]; then exit; fi

pin() { sed -n "s/^$1==\([^ ;]*\).*/\1/p" "$lock"; }
torch=$(pin torch)
say "$target, torch $torch; once, a few minutes"
start=$SECONDS
rm -f .venv/.installed-*
[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "$target" > .venv/.target
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
torch_from=(-c "$lock")
if [ -n "${WHEELHOUSE:-}" ]; then
    [ -d "$WHEELHOUSE" ] || fail "WHEELHOUSE=$WHEELHOUSE is not a folder"
    PIP_FIND_LINKS=$(cd "$WHEELHOUSE" && pwd)
    export PIP_NO_INDEX=1 PIP_FIND_LINKS
elif [ -n "${TORCH_INDEX_URL:-}" ]; then
    torch_from=(--index-url "$TORCH_INDEX_URL")  # such an index may lack the pinned dependencies: the lock follows
elif [ "$device" = cpu ] && [ "$(uname -s)" = Linux ] && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    say "torch may bring several GB of CUDA libraries that this machine cannot use;" \
        "TORCH_INDEX_URL avoids that (env/README.md)"
fi
pip() { .venv/bin/python -m pip "$@"; }

say "1/6 torch"
pip install "torch==$torch" "${torch_from[@]}"
say "2/6 setuptools, wheel"
pip install -qq -c "$lock" setuptools wheel
say "3/6 the lock: $(grep -c == "$lock") packages"
grep -v '^deepspeed==' "$lock" > .venv/.lock-without-deepspeed
pip install -qq --no-deps -r .venv/.lock-without-deepspeed
say "4/6 deepspeed"
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install -qq --no-deps --no-build-isolation "deepspeed==$(pin deepspeed)"
say "5/6 alstlib, and the notebooks' kernel"
pip install -qq --no-deps --no-build-isolation -e .
.venv/bin/python -m ipykernel install --sys-prefix --name python3 > /dev/null
DS_ACCELERATOR=$device .venv/bin/python env/check.py "$lock" >&2 || fail "the environment is not what $lock says: run 'make clean', then again"
say "6/6 DeepSpeed's operators: the first time a minute of compiling"
DS_ACCELERATOR=$device .venv/bin/python -m alstlib.train.operators > .venv/.operators.log 2>&1 \
    || say "warning: they cannot be compiled, see .venv/.operators.log; training on CPUs needs them"
touch "$stamp"
say "done in $((SECONDS - start)) s"
