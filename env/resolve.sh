#!/usr/bin/env bash
# Does pip's index have every version that env/README.md and the files for conda name? Nothing is downloaded; called by
# `make release`. flash-attn 3 is on PyTorch's wheel index for CUDA alone, so it is looked for only with TORCH_INDEX_URL.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
named() {
    sed -n '/pip install/s/.*[ "]\([a-z0-9-]*\)\(\[[a-z0-9]*\]\)\{0,1\}==\([0-9a-z.]*\).*/\1==\3/p' env/README.md
    sed -n 's/^ *\(# \)\{0,1\}- \([a-z0-9-]*==[0-9a-z.]*\)$/\2/p' environment.yml env/environment-cuda.yml
}
status=0
for one in $(named | sort -u); do
    name=${one%%==*}
    index=()
    if [ "$name" = flash-attn-3 ]; then
        if [ -z "${TORCH_INDEX_URL:-}" ]; then
            echo "[resolve] $one: NOT TESTED, set TORCH_INDEX_URL to PyTorch's wheel index for CUDA 13" >&2
            continue
        fi
        index=(--index-url "$TORCH_INDEX_URL")
    fi
    versions=$(.venv/bin/python -m pip index versions --pre "${index[@]}" "$name" 2>/dev/null | tr -d '(),' || true)
    case " ${versions//$'\n'/ } " in
        *" ${one##*==} "*) echo "[resolve] $one is there" >&2 ;;
        *) echo "[resolve] the index has no $one" >&2; status=1 ;;
    esac
done
exit "$status"
