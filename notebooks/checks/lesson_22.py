"""Lesson 22: the longest sequence of a machine that the reader did not see, and what limits it, held to the planner."""

import random
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

from alstlib.config import RunConfig, row_config
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import Shape, read_shape
from alstlib.planner.prediction import longest, predict
from alstlib.units import GIB

from . import Exercise

G = 10**9
MODELS = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B", "Qwen/Qwen3-8B", "Qwen/Qwen2.5-7B")
STATES = "host: states", "device: states"
WORK, INPUTS = "device: work of a layer", "host: inputs of the layers"
REASONS = (*STATES, INPUTS, WORK)
Asked = tuple[Shape, RunConfig, Machine, int]


def drawn(seed: int) -> Asked:
    """A model, its run under ALST, a machine, and how many parameters are trained: no machine that cannot load the
    model, and none whose longest sequence is too short for the straight line of `device_form`."""
    pick = random.Random(seed)
    while True:
        shape = read_shape(pick.choice(MODELS))
        gpus = pick.choice([n for n in (2, 4, 7, 8, 14, 16, 32) if shape.heads % n == 0])
        machine = Machine(
            gpus=gpus, per_node=max(n for n in (1, 2, 4, 7, pick.choice([4, 8])) if gpus % n == 0),
            gpu_memory=int(pick.choice([39.4, 44.3, 79.1, 139.8]) * GIB), host_memory=pick.randrange(90, 1200) * G,
        )  # fmt: skip
        run = row_config("alst", RunConfig(model={"name": shape.name, "dtype": "bf16"}, engine={"sp": 0}))
        trained = shape.parameters
        if pick.random() < 0.4:
            run = run.replace(model={"lora": {"r": 16, "lora_alpha": 32}})
            trained = shape.adapter_parameters(run.model.lora or {})
        else:  # hosts of about the size of the states
            machine = replace(machine, host_memory=int(pick.uniform(0.9, 3) * 18 * trained / machine.nodes))
        best, limit = longest(shape, run, machine), predict(shape, run, machine, 8 * gpus).limit
        held = limit == "device" and device_form(shape, run, machine)[0] > machine.gpu_memory  # type: ignore[operator]
        if best.seq_len > 100_000 * gpus if best else limit == "host" or held:
            return shape, run, machine, trained


def device_form(shape: Shape, run: RunConfig, machine: Machine) -> tuple[float, float]:
    """Device bytes at any length, and for each row of a rank: the straight line that long sequences follow."""
    plenty = replace(machine, host_memory=None)
    short, long = (predict(shape, run, plenty, n).device_peak for n in (8_000_000, 16_000_000))
    return 2 * short - long, (long - short) / (8_000_000 / machine.gpus)


def planned(asked: Asked) -> tuple[int, str]:
    """The planner's longest sequence, and what limits it in the lesson's words."""
    shape, run, machine, _ = asked
    if (best := longest(shape, run, machine)) is None:
        return 0, STATES[0] if predict(shape, run, machine, 8 * machine.gpus).limit == "host" else STATES[1]
    # All inputs of the layers on the host: is it the device that a longer sequence goes beyond?
    rows = 1.02 * best.seq_len / machine.gpus
    needed = sum(n for name, n in best.host.items() if name != "checkpoints") + shape.layers * 2 * shape.width * rows
    return best.seq_len, INPUTS if needed > machine.host_memory / machine.ranks_of_node else WORK  # type: ignore[operator]


def reach(function: Callable[..., Any]) -> str:
    found: dict[str, int] = {}
    for seed in range(24):
        asked = shape, run, machine, trained = drawn(seed)
        per_node, memory = machine.host_memory // G, machine.gpu_memory / GIB  # type: ignore[operator]
        case = f"{shape.name}, {'LoRA' if run.model.lora else 'full'}, {machine.gpus} GPUs of {memory:.1f} GiB"
        case += f" in nodes of {machine.per_node} with {per_node} GB"
        answer = function(shape, machine, trained, *device_form(shape, run, machine))
        assert isinstance(answer, tuple), f"{case}: a pair (tokens, reason) is wanted, not {answer!r}"
        assert len(answer) == 2, f"{case}: a pair (tokens, reason) is wanted, not {answer!r}"
        tokens, reason = planned(asked)
        assert answer[1] in REASONS, f"{case}: {answer[1]!r} is none of {', '.join(map(repr, REASONS))}"
        assert answer[1] == reason, f"{case}: the limit is {reason!r}, not {answer[1]!r}"
        off = abs(answer[0] / tokens - 1) if tokens else float(answer[0] != 0)
        assert off < 0.03, f"{case}: {tokens:,} tokens fit, limited by {reason!r}; your function says {answer[0]:,.0f}"
        found[reason] = found.get(reason, 0) + 1
    return "24 random machines: " + ", ".join(f"{n} limited by {reason!r}" for reason, n in sorted(found.items()))


def _reach(
    shape: Any, machine: Any, trained: int, fixed: float, per_row: float, *, bytes_of: int = 18, shared: bool = True,
    again: bool = True,
) -> tuple[float, str]:  # fmt: skip
    host = machine.host_memory / (machine.ranks_of_node if shared else 1)
    room = host - machine.overheads.process - bytes_of * trained / machine.gpus
    if room < 0 or fixed > machine.gpu_memory:
        return 0, STATES[0] if room < 0 else STATES[1]
    row, best, rows = 2 * shape.width, 0.0, (machine.gpu_memory - fixed) / per_row
    for every in range(1, (shape.layers if again else 1) + 1):
        device = per_row + (every - 1) * (row + shape.heads * (2 * shape.head_dim + 4))
        best = max(best, min(room / ceil(shape.layers / every) / row, (machine.gpu_memory - fixed) / device))
    return best * machine.gpus, WORK if rows * shape.layers * row < room else INPUTS


def _sixteen_bytes(*asked: Any) -> tuple[float, str]:
    return _reach(*asked, bytes_of=16)


def _whole_node_for_each_rank(*asked: Any) -> tuple[float, str]:
    return _reach(*asked, shared=False)


def _every_input_on_the_host(*asked: Any) -> tuple[float, str]:
    return _reach(*asked, again=False)


def _always_the_device(*asked: Any) -> tuple[float, str]:
    return _reach(*asked)[0], WORK


def reasons(answer: Callable[[], Any]) -> str:
    given = answer()
    assert isinstance(given, list | tuple), "a list of four reasons is wanted"
    assert len(given) == 4, f"four reasons are wanted, not {len(given)}"
    machines = (
        ("A", "meta-llama/Llama-3.1-70B", 16, 8, 39.4, 900, False),
        ("B", "meta-llama/Llama-3.1-70B", 8, 8, 22.1, 1000, True),
        ("C", "Qwen/Qwen3-32B", 4, 4, 79.1, 500, False),
        ("D", "Qwen/Qwen3-8B", 4, 4, 22.1, 500, True),
    )
    for mine, (letter, name, gpus, per_node, memory, host, lora) in zip(given, machines):
        machine = Machine(gpus=gpus, per_node=per_node, gpu_memory=int(memory * GIB), host_memory=host * G)
        run = row_config("alst", RunConfig(model={"name": name, "dtype": "bf16"}, engine={"sp": 0}))
        run = run.replace(model={"lora": {"r": 16, "lora_alpha": 32}}) if lora else run
        _, reason = planned((read_shape(name), run, machine, 0))
        assert mine in REASONS, f"machine {letter}: {mine!r} is none of {', '.join(map(repr, REASONS))}"
        assert mine == reason, f"machine {letter}: it is not {mine!r}"
    return "all four"


def host_memory(answer: Callable[[], Any]) -> str:
    def fits(gigabytes: float) -> bool:
        machine = Machine(gpus=4, per_node=4, host_memory=int(gigabytes * G))
        run = row_config("alst", RunConfig(model={"name": "Qwen/Qwen3-32B", "dtype": "bf16"}, engine={"sp": 0}))
        return predict(read_shape("Qwen/Qwen3-32B"), run, machine, 500_000).fits

    mine = answer()
    assert fits(1.02 * mine), f"with {mine:,.0f} GB, 500,000 tokens do not fit"
    assert not fits(0.98 * mine), f"less than {mine:,.0f} GB is enough"
    return f"about {mine:,.0f} GB in the node"


EXERCISES = {
    1: Exercise(
        check=reach,
        hints=(
            "First the states: what is left of a rank's share of the host, and of the device, before the first token? "
            "If nothing is left, the answer is 0 tokens, and you know why.",
            "Then, for one k: the rows that the host allows are its room divided by ceil(L / k) inputs; the rows that "
            "the device allows are its room divided by `per_row` and k - 1 segments. The smaller of the two counts.",
            "Take the best of all k from 1 to L, times the number of ranks. The reason is decided at k = 1: if the "
            "device allows fewer rows than the host there, it is the work of a layer, else the inputs.",
        ),
        mistakes=(
            _sixteen_bytes, _whole_node_for_each_rank, _every_input_on_the_host, _always_the_device,
        ),
    ),
    2: Exercise(
        check=reasons,
        hints=(
            "Begin with the states: 18 bytes for each trained parameter on the hosts, 2 for each parameter on the "
            "devices.",
            "A and C train all parameters. For which of them do the hosts hold 18 bytes for each?",
            "The lesson's `ledger` gives both sides for the machines on which the states fit.",
        ),
        mistakes=(lambda: [WORK] * 4, lambda: [INPUTS, STATES[1], STATES[0], INPUTS]),
    ),
    3: Exercise(
        check=host_memory,
        hints=(
            "First the part that does not depend on the length: states and the processes. Then look at the device: how "
            "many inputs for each rank may it take over from the host at 500,000 tokens?",
            "Your function of exercise 1 gives the longest sequence for one host memory: try values.",
        ),
        mistakes=(lambda: 591, lambda: 900),
    ),
}  # fmt: skip
