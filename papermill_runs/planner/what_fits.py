"""The table of the page that says what fits.

Each public model on each kind of GPU, on few and many of them, with little and much host memory, all weights or LoRA:
what `alst plan` answers. The command goes on where it stopped; `--again` plans anew what the file has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from public_fits import write

import alstlib
from alstlib.base.config import Model, RunConfig
from alstlib.base.units import GIB, format_seconds
from alstlib.hf.loading.public_models import PUBLIC
from alstlib.planner import fits
from alstlib.planner.command import add_arguments, read
from alstlib.planner.gpus import GPUS, Rates
from alstlib.planner.question import CHUNK, WAYS, Question, trained_length
from alstlib.planner.rendering import lacks, limit_in_short

FILE = Path("papermill_runs/results/planner/what_fits.json")
COMMAND = "alst plan --model {model} --gpu {gpu} --gpus {gpus} --host-memory {host}"
HOSTS = {"half of it": 0.5, "what clouds have": 1.0, "twice as much": 2.0}
"""Memory of a node as a part of what clouds have with such GPUs."""
TRAINED = {"all weights": "", "an adapter (LoRA, r=16)": " --set 'model.lora={r: 16}'"}
"""What is trained, and how the command says it."""
WAYS_TOLD: dict[str, dict[str, dict[str, Any]]] = {
    "layers whole": {"": {}}, "layers in chunks": {way: of for way, of in WAYS.items() if of["options.chunk"]},
}  # fmt: skip
"""Ways to run a model, as fields of the run: of each kind the longest is told. `alst plan` compares all."""


def hosts(rates: Rates, gpus: int) -> list[str]:
    """Host memory of each node, as the command takes it."""
    nbytes = [int(part * min(gpus, rates.node_gpus) * rates.node_host) for part in HOSTS.values()]
    return [f"{n / 1e9:g}GB" if n % 10**7 == 0 else f"{n / GIB:g}GiB" for n in nbytes]


def asked(command: str) -> Question:
    """The question that a command asks."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    request = read(parser.parse_args(shlex.split(command)[2:]))
    return request.question(request.machines[0], request.gpus or 0)


def cell(question: Question, ways: Mapping[str, dict[str, Any]]) -> list[Any] | None:
    """The longest sequence of these ways with its step, tokens per second for each GPU, limit and way; 0 and what is
    missing where nothing fits; None where the steps were not simulated yet."""
    asked = {way: replace(question, run=question.run.replace(**changes)) for way, changes in ways.items()}
    try:
        found = {way: best for way, one in asked.items() if (best := one.longest())}
        if not found:
            return [0, lacks(question.at(question.shortest), question.machine)]
        way, best = max(found.items(), key=lambda item: item[1].seq_len)
        limit = limit_in_short(asked[way].beyond(best))
    except fits.NotSimulated:
        return None
    rate = float(f"{question.tokens_per_second(best):.3g}")
    return [best.seq_len, format_seconds(best.seconds["step"]), rate, limit, *filter(None, [way])]


def cells(command: str) -> list[Any] | str:
    """The cells of whole layers and of layers in chunks; or why `apply` refuses the run."""
    try:
        question = asked(command)
        return [cell(question, ways) for ways in WAYS_TOLD.values()]
    except fits.NotSimulated:
        return [None, None]
    except ValueError as e:
        return str(e)


def renewed(was: Any, command: str, again: bool) -> Any:
    """Cells that were not known, or all of them `again`. What only a simulation refuses stays refused where nothing may
    be simulated."""
    if not again and (isinstance(was, str) or None not in was):
        return was
    now = cells(command)
    return was if isinstance(was, str) and now == [None, None] else now


def plan(name: str, gpus: int, before: dict[str, Any], again: bool = False) -> dict[str, Any]:
    """By kind of GPU: for each of `HOSTS` and each of `TRAINED` its cells. What was planned stays, without `again`."""
    made = {}
    for gpu, rates in GPUS.items():
        commands = [COMMAND.format(model=name, gpu=gpu, gpus=gpus, host=host) for host in hosts(rates, gpus)]
        old, none = before.get(gpu, ()), [[[None]] * len(TRAINED)] * len(HOSTS)
        old = old if [*map(len, old)] == [*map(len, none)] else none
        made[gpu] = [
            [renewed(was, command + how, again) for was, how in zip(each, TRAINED.values())]
            for each, command in zip(old, commands, strict=True)
        ]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*PUBLIC], help="only these public models")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 4, 8, 64], help="on so many GPUs")
    parser.add_argument("--known", action="store_true", help="simulate nothing: leave out what was not simulated yet")
    parser.add_argument("--again", action="store_true", help="plan anew what the file has")
    args = parser.parse_args()
    entries = json.loads(FILE.read_text()) if FILE.exists() else {}
    entries["about"] = {
        "mode": "predicted", "version": alstlib.__version__, "command": COMMAND, "trained": TRAINED,
        "chunks": f" --set options.chunk={CHUNK}", "ways": [*WAYS_TOLD], "hosts": [*HOSTS],
        "gpus": {name: [round(rates.usable / GIB, 1), rates.node_gpus] for name, rates in GPUS.items()},
        "memory": {name: [hosts(rates, n + 1) for n in range(rates.node_gpus)] for name, rates in GPUS.items()},
        "longest": {name: trained_length(RunConfig(model=Model(name=name))) for name in PUBLIC},
    }  # fmt: skip
    with fits.known_only() if args.known else nullcontext():
        for name, gpus in itertools.product(args.models, args.gpus):
            print(key := f"{name} on {gpus}", flush=True)
            made = plan(name, gpus, entries.get(key, {}), args.again)
            if any(one != [None, None] for each in made.values() for host in each for one in host):
                entries[key] = made
                write(entries, FILE)


if __name__ == "__main__":
    main()
