"""Lesson 12: the line through two simulated steps, and the longest sequence of a machine that the reader did not see,
held to the planner."""

import random
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

from alstlib.base.config import RunConfig, row_config
from alstlib.base.units import GIB
from alstlib.planner.fits import Moment
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import Shape, read_shape
from alstlib.planner.prediction import longest, predict, states
from checks import Exercise

G = 10**9
EIGHT, QWEN = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B"
RUNS = ((EIGHT, 8, False), (EIGHT, 16, False), (QWEN, 8, False), (QWEN, 4, True))
"""Model, GPUs and LoRA of what the lesson asks the planner about: it has simulated them."""
SHORTEST = 65_536
"""Rows of a rank from which on one line holds, that of `device_form`."""
STATES = "host: states", "device: states"
WORK, INPUTS = "device: work of a layer", "host: inputs of the layers"
REASONS = (*STATES, INPUTS, WORK)
Asked = tuple[Shape, RunConfig, Machine, int]


# Exercise 1


def check_fit(fitted_at: Callable[..., Any]) -> str:
    pick = random.Random(12)
    cases = [
        ("a line that begins above zero", (100, {"mlp": 1_200.0}), (300, {"mlp": 1_600.0}), 700),
        ("rows between the two", (101, {"loss": 7.0, "mlp": 5_050.0}), (307, {"loss": 7.0, "mlp": 15_350.0}), 211),
        ("a category that the shorter one does not have", (64, {}), (128, {"checkpoints": 640.0}), 256),
        ("a category that the longer one does not have", (64, {"loss": 640.0}), (128, {"mlp": 1.0}), 96),
        ("a line that falls below 0", (64, {"loss": 640.0}), (128, {"loss": 64.0}), 1_001),
    ]
    for _ in range(8):
        first = pick.randrange(3, 5_000)
        second, rows = first + pick.randrange(1, 5_000), pick.randrange(1, 20_000)
        both = [{name: pick.randrange(10**9) for name in ("attention", "mlp", "exchange")} for _ in range(2)]
        cases.append((f"rows {first} and {second}", (first, both[0]), (second, both[1]), rows))
    for case, short, long, rows in cases:
        want = _moment(short, long).at(rows)
        got = fitted_at(short, long, rows)
        assert isinstance(got, dict), f"{case}: a dictionary is wanted, not {got!r}"
        assert set(got) == set(want), f"{case}: categories {sorted(got)}, and {sorted(want)} are wanted"
        for name, nbytes in want.items():
            assert abs(got[name] - nbytes) <= 1e-6 * abs(nbytes) + 1e-3, (
                f"{case}: {got[name]:,.1f} bytes of {name} at {rows} rows, and the line through {short} and {long} "
                f"has {nbytes:,.1f}"
            )
    return "between the two lengths and beyond them"


def _moment(short: Any, long: Any) -> Moment:
    """As the planner keeps it."""
    (first, low), (second, high) = short, long
    slopes = {n: (high.get(n, 0.0) - low.get(n, 0.0)) / (second - first) for n in {*low, *high}}
    return Moment("", False, {n: (low.get(n, 0.0) - slope * first, slope) for n, slope in slopes.items()})


def _through_zero(short: Any, long: Any, rows: int) -> dict[str, float]:
    return {name: nbytes / long[0] * rows for name, nbytes in long[1].items()}


def _only_in_both(short: Any, long: Any, rows: int) -> dict[str, float]:
    return {
        name: nbytes for name, nbytes in _moment(short, long).at(rows).items() if name in short[1] and name in long[1]
    }


def _below_zero(short: Any, long: Any, rows: int) -> dict[str, float]:
    return {name: base + each * rows for name, (base, each) in _moment(short, long).line.items()}


def _from_the_shorter(short: Any, long: Any, rows: int) -> dict[str, float]:
    line = _moment(short, long).line
    return {name: max(0.0, short[1].get(name, 0) + each * rows) for name, (_, each) in line.items()}


# Exercises 2 to 4


def run_of(name: str, lora: bool) -> RunConfig:
    run = row_config("alst", RunConfig(model={"name": name, "dtype": "bf16"}, engine={"sp": 0}))
    return run.replace(model={"lora": {"r": 16, "lora_alpha": 32}}) if lora else run


def drawn(seed: int) -> Asked:
    """A model, its run under ALST, a machine, and how many parameters are trained: no machine that cannot load the
    model, and none whose longest sequence is too short for the straight line of `device_form`."""
    pick = random.Random(seed)
    while True:
        name, gpus, lora = pick.choice(RUNS)
        shape, run = read_shape(name), run_of(name, lora)
        trained = shape.adapter_parameters(run.model.lora or {}) if lora else shape.parameters
        memory = pick.choice([pick.uniform(14, 24), pick.uniform(14, 24), pick.uniform(24, 141)])
        machine = Machine(gpus=gpus, per_node=pick.choice([4, 8]), gpu_memory=round(memory * GIB))
        needed = 18 * trained / machine.nodes + machine.ranks_of_node * 4 * GIB
        inputs = SHORTEST * shape.layers * 2 * shape.width * machine.ranks_of_node
        enough = needed + inputs * pick.uniform(0.6, 4)
        host = pick.uniform(0.8, 0.99) * needed if pick.random() < 0.2 else enough
        machine = replace(machine, host_memory=round(host))
        at = predict(shape, run, machine, SHORTEST * gpus)
        if not at.loading.why and (at.fits or _states(shape, run, machine)):
            return shape, run, machine, trained


def device_form(shape: Shape, run: RunConfig, machine: Machine) -> tuple[float, float]:
    """Device bytes at any length, and for each row of a rank: the straight line that long sequences follow."""
    plenty = replace(machine, host_memory=None)
    short, long = (predict(shape, run, plenty, n * 1_000_000 * machine.gpus).device_peak for n in (1, 2))
    return 2 * short - long, (long - short) / 1_000_000


def _states(shape: Shape, run: RunConfig, machine: Machine) -> str:
    """Which of the two states do not fit, if any."""
    host = sum(states(shape, run, machine).host.values()) + machine.overheads.process
    if host > machine.host_memory / machine.ranks_of_node:  # type: ignore[operator]
        return STATES[0]
    return STATES[1] if device_form(shape, run, machine)[0] > machine.gpu_memory else ""  # type: ignore[operator]


def planned(asked: Asked) -> tuple[int, str]:
    """The planner's longest sequence, and what limits it in the lesson's words."""
    shape, run, machine, _ = asked
    if reason := _states(shape, run, machine):
        return 0, reason
    best = longest(shape, run, machine)
    assert best is not None
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
        case += f" in nodes of {machine.ranks_of_node} with {per_node} GB"
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
        ("A", QWEN, 8, 4, 79.1, 450, False),
        ("B", QWEN, 4, 4, 22.1, 1000, True),
        ("C", EIGHT, 8, 8, 79.1, 160, False),
        ("D", EIGHT, 8, 8, 39.4, 1900, False),
    )
    for mine, (letter, name, gpus, per_node, memory, host, lora) in zip(given, machines):
        machine = Machine(gpus=gpus, per_node=per_node, gpu_memory=int(memory * GIB), host_memory=host * G)
        _, reason = planned((read_shape(name), run_of(name, lora), machine, 0))
        assert mine in REASONS, f"machine {letter}: {mine!r} is none of {', '.join(map(repr, REASONS))}"
        assert mine == reason, f"machine {letter}: it is not {mine!r}"
    return "all four"


def host_memory(answer: Callable[[], Any]) -> str:
    def fits(gigabytes: float) -> bool:
        machine = Machine(gpus=8, per_node=4, host_memory=int(gigabytes * G))
        return predict(read_shape(QWEN), run_of(QWEN, False), machine, 1_450_000).fits

    mine = answer()
    assert fits(1.02 * mine), f"with {mine:,.0f} GB, 1,450,000 tokens do not fit"
    assert not fits(0.98 * mine), f"less than {mine:,.0f} GB is enough"
    return f"about {mine:,.0f} GB in each node"


EXERCISES = {
    1: Exercise(
        check=check_fit,
        hints=(
            "Do one category after the other. Which categories are there? Those of either moment.",
            "The bytes for each row are the difference of the bytes, divided by the difference of the rows. Where does "
            "the line begin?",
            "`here + (there - here) / (second - first) * (rows - first)`, and at least 0.",
        ),
        mistakes=(_through_zero, _only_in_both, _below_zero, _from_the_shorter),
    ),
    2: Exercise(
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
    3: Exercise(
        check=reasons,
        hints=(
            "Begin with the states: 18 bytes for each trained parameter on the hosts, 2 for each parameter on the "
            "devices.",
            "On which machine do 18 bytes for each of 8 billion parameters, and the processes, not fit?",
            "The lesson's `ledger` gives both sides for the machines on which the states fit.",
        ),
        mistakes=(lambda: [WORK] * 4, lambda: [INPUTS, STATES[0], STATES[1], WORK]),
    ),
    4: Exercise(
        check=host_memory,
        hints=(
            "First the part that does not depend on the length: states and the processes. Then look at the device: how "
            "many inputs for each rank may it take over from the host at 1,450,000 tokens?",
            "Your function of exercise 2 gives the longest sequence for one host memory: try values.",
        ),
        mistakes=(lambda: 788, lambda: 320),
    ),
}  # fmt: skip
