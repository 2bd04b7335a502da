#!/usr/bin/env bash
# An offline wheelhouse: fetch every wheel of a target on a machine with a network, install them on one without.
#
#   env/wheelhouse.sh download FOLDER [cpu|cuda] [3.11 to 3.14]   with a network (Linux; pip of any Python >= 3.11)
#   env/wheelhouse.sh install FOLDER                             without: sets up .venv from FOLDER alone
#
# ARCH=x86_64|aarch64 is the target's (default: this machine's); TORCH_INDEX_URL and PYTHON as in env/README.md.
# Copy FOLDER and the checkout to the other machine in between; it needs Python >= 3.11, git and make, as ever.
set -euo pipefail
usage() { sed -n '4,5s/^# *//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[ $# -ge 2 ] || usage
action=$1
folder=$2
case $action in
    download) mkdir -p "$folder" ;;
    install) [ -d "$folder" ] || { echo "FOLDER=$folder does not exist" >&2; exit 1; } ;;
    *) usage ;;
esac
folder=$(cd "$folder" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "$action" = install ]; then WHEELHOUSE=$folder exec env/install.sh; fi

device=${3:-cpu}
version=${4:-3.11}
arch=${ARCH:-$(uname -m)}
lock=env/$device-py${version/./}.txt
[ -e "$lock" ] || { echo "no lock $lock: the targets are cpu or cuda, 3.11 to 3.14" >&2; exit 1; }
python=${PYTHON:-python3}
pin() { sed -n "s/^$1==\([^ ;]*\).*/\1/p" "$lock"; }

target=(--only-binary=:all: --implementation cp --python-version "$version" --abi "cp${version/./}" --abi abi3 --abi none)
for minor in $(seq 39 -1 5); do target+=(--platform "manylinux_2_${minor}_$arch"); done
for name in manylinux2014 manylinux2010 manylinux1 linux; do target+=(--platform "${name}_$arch"); done

# torch with what it needs: for a GPU these are the CUDA libraries, which the lock leaves to torch.
torch_from=(-c "$lock")
if [ -n "${TORCH_INDEX_URL:-}" ]; then torch_from=(--index-url "$TORCH_INDEX_URL"); fi
"$python" -m pip download --dest "$folder" "${target[@]}" "torch==$(pin torch)" "${torch_from[@]}"
rest=$(mktemp)
trap 'rm -f "$rest"' EXIT
left=(-e '^deepspeed==' -e '^torch==')
if [ -n "${TORCH_INDEX_URL:-}" ]; then  # torch brings these for its own CUDA (env/install.sh)
    left+=(-e '^cuda-bindings==' -e '^cuda-pathfinder==' -e '^nvidia-nvjitlink==')
fi
grep -v "${left[@]}" "$lock" > "$rest"
"$python" -m pip download -q --dest "$folder" "${target[@]}" --no-deps -r "$rest" -r env/site.txt
# deepspeed is published as source; with nothing compiled its wheel is pure Python, the same for every target.
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$python" -m pip wheel -q --no-deps --wheel-dir "$folder" "deepspeed==$(pin deepspeed)"
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $(du -sh "$folder" | cut -f 1) in $folder for $lock on $arch"
