"""Lesson 12: what the hosts' memory allows, and two look-ups with the planner."""

from alstlib.config import RunConfig, row_config
from alstlib.planner.gpus import label_bytes
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.prediction import longest, predict
from checks import Exercise

EIGHT, SEVENTY, QWEN = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B"
TB = 10**12


def whole(name):
    return row_config("ours", RunConfig(model={"name": name, "dtype": "bf16"}, engine={"sp": 0})).replace(
        options={"chunk": None}
    )


def check_host_limit(host_limit):
    for name, gpus, per_node, host in (
        (EIGHT, 8, 8, 1.9 * TB), (SEVENTY, 16, 8, 1.9 * TB), (QWEN, 8, 4, 0.5 * TB), (QWEN, 12, 4, 0.7 * TB),
    ):  # fmt: skip
        shape, machine = read_shape(name), Machine(gpus=gpus, per_node=per_node, host_memory=int(host))
        got = host_limit(shape, machine, shape.parameters)
        what = f"{name} on {gpus} GPUs, {per_node} in each node of {host / TB:g} TB"
        assert got > 0, f"{what}: {got}, but the states leave room"
        plenty = Machine(gpus=gpus, per_node=per_node, host_memory=10**16)  # no outputs are left out for want of room
        sp = 0 if shape.heads % gpus == 0 else 4
        run = whole(name).replace(options={"save_attention": False}, engine={"sp": sp})
        each = predict(shape, run, plenty, 1_000_000).host
        ranks = sp or plenty.gpus
        checkpoints = each["checkpoints"] * ranks / 1_000_000  # of a token, over all ranks that share it
        constant = sum(each[kind] for kind in ("optimizer", "gradients", "process")) * gpus
        want = (gpus // per_node * host - constant) / checkpoints
        assert abs(got - want) <= 0.01 * want, f"{what}: {got:,.0f} tokens, and the planner's bytes allow {want:,.0f}"
    small = Machine(gpus=4, per_node=4, host_memory=500 * 10**9)
    qwen = read_shape(QWEN)
    got = host_limit(qwen, small, qwen.parameters)
    assert got == 0, f"{QWEN} on one node of 0.5 TB: {got:,.0f} tokens, but the states alone do not fit"
    adapter = host_limit(qwen, small, 134_000_000)
    assert adapter > 500_000, (
        f"134M trained parameters on one node of 0.5 TB: {adapter:,.0f}, but only they have states"
    )
    return "the states come first, and the checkpoints share what is left"


def no_processes(shape, machine, trained):
    left = machine.gpus // machine.per_node * machine.host_memory - 18 * trained
    return max(0, left // (shape.layers * shape.width * 2))


def one_node_only(shape, machine, trained):
    return max(0, (machine.host_memory - 18 * trained - machine.per_node * 2**32) // (shape.layers * shape.width * 2))


def sixteen_bytes(shape, machine, trained):
    left = machine.gpus // machine.per_node * machine.host_memory - 16 * trained - machine.gpus * 2**32
    return max(0, left // (shape.layers * shape.width * 2))


def below_zero(shape, machine, trained):
    left = machine.gpus // machine.per_node * machine.host_memory - 18 * trained - machine.gpus * 2**32
    return left // (shape.layers * shape.width * 2)


def all_are_trained(shape, machine, trained):
    return max(0, below_zero(shape, machine, shape.parameters))


def check_gpus(answer):
    gpus = answer()

    def fits(n):
        run = whole(SEVENTY).replace(options={"chunk": 16_384, "on_host": "none"})
        return n > 0 and predict(read_shape(SEVENTY), run, Machine(gpus=n, host_memory=int(1.9 * TB)), 4_000_000).fits

    assert gpus % 8 == 0, f"{gpus} GPUs are not whole nodes of 8"
    assert fits(gpus), f"{gpus} GPUs do not hold it"
    assert not fits(gpus - 8), f"{gpus - 8} GPUs hold it as well"
    return "one node less does not hold it"


def check_length(answer):
    tokens, shape = answer(), read_shape(EIGHT)
    small = Machine(gpus=8, gpu_memory=label_bytes("40GB"), host_memory=int(1.9 * TB))
    assert predict(shape, whole(EIGHT), small, tokens).fits, f"{tokens:,} tokens do not fit"
    assert not predict(shape, whole(EIGHT), small, round(1.02 * tokens)).fits, f"2% more than {tokens:,} tokens fit too"
    large = longest(shape, whole(EIGHT), Machine(gpus=8, gpu_memory=label_bytes("80GB"), host_memory=int(1.9 * TB)))
    return f"{tokens:,} tokens; on 80 GB it is {large.seq_len:,}"


EXERCISES = {
    1: Exercise(
        check=check_host_limit,
        hints=(
            "Add up the memory of all nodes. What is in it before the first token?",
            "Take away 18 bytes for each trained parameter, once for the cluster, and 4 GiB for each GPU's process.",
            "Divide what is left by the bytes of one token's checkpoints: layers x width x 2. Never less than 0.",
        ),
        mistakes=(no_processes, one_node_only, sixteen_bytes, below_zero, all_are_trained),
    ),
    2: Exercise(
        check=check_gpus,
        hints=(
            "`predict(shape, run, Machine(gpus=n, host_memory=...), 4_000_000).fits` answers for one number of GPUs.",
            "The run is `whole` with the other model, and with the options chunk=16_384 and on_host='none'; try 8, 16, "
            "... GPUs.",
        ),
        mistakes=(lambda: 8, lambda: 36, lambda: 64),
    ),
    3: Exercise(
        check=check_length,
        hints=(
            "`longest(shape, run, machine).seq_len` answers; only the machine is another.",
            'Make a `Machine` with `gpu_memory=label_bytes("40GB")`, and everything else as in the lesson.',
        ),
        mistakes=(lambda: 2_665_000, lambda: 1_000_000),
    ),
}
