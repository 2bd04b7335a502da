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
    for candidate in python3 python3.13 python3.12 python3.11 python3.14 python; do
        version=$(probe "$candidate") || continue
        if [ -e "env/cpu-py${version/ /}.txt" ]; then python=$(base "$candidate"); return; fi
        newer=${newer:-$candidate}
    done
    [ -n "$newer" ] || fail "no Python >= 3.11 with the venv and ensurepip modules found (Debian and Ubuntu: package" \
        "python3-venv); install Python 3.11 to 3.14, or name one with PYTHON=/path/to/python"
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

# torch's CUDA 13, which pip's usual index has, wants this driver; said before gigabytes are downloaded for nothing.
least_driver=580
old_driver() {
    local driver
    if [ "$device" = cpu ] || [ -n "${TORCH_INDEX_URL:-}" ]; then return 1; fi
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
    case ${driver%%.*} in "" | *[!0-9]*) return 1 ;; esac
    [ "${driver%%.*}" -lt "$least_driver" ] || return 1
    echo "the NVIDIA driver is $driver, and torch from the usual index (CUDA 13) needs $least_driver or newer: update it," \
        "or set TORCH_INDEX_URL to the wheel index for CUDA 12 that PyTorch's Get-started page names (env/README.md)," \
        "or set ALST_DEVICE=cpu"
}

choose_python
choose_device
version=$(probe "$python")
lock=env/$device-py${version/ /}.txt
if [ ! -e "$lock" ]; then
    say "warning: Python ${version/ /.} is newer than the locks; trying those of Python 3.14"
    lock=env/$device-py314.txt
fi
target="$lock Python ${version/ /.} in $root"
hash=$(cat "$lock" pyproject.toml env/install.sh env/jupyter/etc/*/*.py env/jupyter/etc/*/*/*.json | git hash-object --stdin | cut -c 1-12)
stamp=.venv/.installed-$hash
if [ "${1:-}" = --plan ]; then
    echo "python=$python lock=$lock stamp=$stamp"
    if old=$(old_driver); then say "warning: $old"; fi
    exit
fi
if [ ! -e "$stamp" ] && old=$(old_driver); then fail "$old"; fi

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
# A torch for another CUDA brings these itself; env/check.py leaves them out too.
: > .venv/.left-out
if [ "$device" = cuda ] && [ -n "${TORCH_INDEX_URL:-}" ]; then
    printf '%s\n' cuda-bindings cuda-pathfinder nvidia-nvjitlink > .venv/.left-out
fi
grep -v -x -f <(sed 's/.*/&==.*/' .venv/.left-out) "$lock" > .venv/.lock
torch_from=(-c .venv/.lock)
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
install() { .venv/bin/python -m pip install --no-compile "$@"; }  # everything is compiled at the end, on all cores

say "1/5 torch"
install "torch==$torch" "${torch_from[@]}"
say "2/5 setuptools, wheel"
install -qq -c .venv/.lock setuptools wheel
say "3/5 the lock: $(grep -c == .venv/.lock) packages"
grep -v '^deepspeed==' .venv/.lock > .venv/.lock-without-deepspeed
install -qq --no-deps -r .venv/.lock-without-deepspeed
say "4/5 deepspeed"
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu install -qq --no-deps --no-build-isolation "deepspeed==$(pin deepspeed)"
say "5/5 alstlib, and the notebooks' kernel"
install -qq --no-deps --no-build-isolation -e .
.venv/bin/python -m ipykernel install --sys-prefix --name python3 > /dev/null
cp -R env/jupyter/. .venv/
.venv/bin/python -m compileall -q -j 0 -x '/tests?/' .venv/lib > /dev/null 2>&1 || true  # some files are for another Python
DS_ACCELERATOR=$device .venv/bin/python env/check.py "$lock" >&2 || fail "the environment is not what $lock says: run 'make clean', then again"
touch "$stamp"
say "done in $((SECONDS - start)) s"
