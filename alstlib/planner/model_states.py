"""What DeepSpeed ZeRO holds of a model on a rank, in bytes. Without torch.

(Rajbhandari et al., 2020, arXiv 1910.02054; DeepSpeed 0.19.8.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from alstlib.base.config import RunConfig
from alstlib.base.sizing import ON_DISK, zero_bucket

ZERO_DEFAULT = 500_000_000
"""Elements of DeepSpeed's buckets where nothing is said, as in the paper; up to twice as many stay gathered."""
SUB_GROUP = 1_000_000_000
"""Elements of a rank's shard that stage 3 steps on at a time, as DeepSpeed has them by default."""
WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER, BUCKETS, COPIES, FILES = (
    "weights", "gathered weights", "gradients", "optimizer", "buckets", "copies of buckets", "buffers of files",
)  # fmt: skip
"""Categories of what is held."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Elements of a model."""

    parameters: int
    layer: int
    """Parameters of a decoder layer."""
    embedding: int
    """Parameters of the embedding (and the head)."""
    largest: int = 0
    """Parameters of the largest tensor that is trained."""
    tensor: int = 0
    """Parameters of the largest tensor, whether it is trained or not."""
    trainable: int | None = None
    """The number of parameters that are trained, such as those of an adapter; None: all."""
    packed: int = 0
    """Bytes of weights of which the most have 4 bits: they are whole on each rank, which is assumed, because ZeRO
    divides no packed weights; 0: none has."""


@dataclass(frozen=True)
class States:
    """A rank's model states and ZeRO's buffers, by name. Bytes."""

    device: dict[str, int]
    host: dict[str, int]
    others: dict[str, dict[str, int]]
    """The entries of another size when memory peaks in a layer's attention or MLP (`attention`, `mlp`, at its `end`),
    outside the layers (`outside`), in forward (`forward`) or after backward (`after`)."""
    disk: dict[str, int] = field(default_factory=dict)
    """What is in files."""

    def at(self, part: str) -> dict[str, int]:
        """The device's, while memory peaks in this part (`fits.Moment.part`)."""
        found = {**self.device, **self.others.get(part, {})}
        return {name: nbytes for name, nbytes in found.items() if nbytes}


def model_states(
    run: RunConfig, sizes: Sizes, world: int, element: int, bucket: int | None = None, reduced: int | None = None,
    rounded: bool = False,
) -> States:  # fmt: skip
    """What a model takes on each of `world` ranks.

    ZeRO keeps fp32 weights and AdamW's two moments (12 bytes per parameter). With the optimizer on the host, gradients
    go there too, with an fp32 copy for its step. Stages 1 and 2 also have a buffer there, and one on the device, for
    the largest gradient; they keep the gradients of earlier micro-batches (or blocks) once more. On the host DeepSpeed
    pins all of this but the moments and stage 3's fp32 weights.

    Under stage 3 a device holds its shards, the bucket in which gradients are reduced, and the weights that are
    gathered. DeepSpeed gathers weights ahead until two buckets of them are there (`stage3_max_live_parameters`), the
    last tensor counted whole, which may be the embedding, and keeps those that it will use again within two buckets
    (`stage3_max_reuse_distance`): a model of less than two buckets stays gathered from the first layer on. In forward,
    the buffer in which weights arrived is held until the last of them is used: a bucket more, beside fewer activations.
    It is counted for models of less than 16M weights, where a bucket is most of a layer's memory. Without prefetch
    a layer is gathered, with an embedding that is used again soon; the last one's backward, which has the most while
    checkpoints lie on the device, also finds a bucket of weights of the layers before it.

    After backward, when no activations are left, an optimizer on the device steps: on a copy of gradients in fp32, and
    from stage 1 on beside one more that is flat, of a rank's part (stage 3: of a group). Before that stage 0 copies
    gradients into a bucket of its own.

    Where a layer and the embedding are more than two buckets, these are what is there: the head is still gathered when
    the last layer's backward runs, where memory peaks while checkpoints lie on the device. Where they do not, all
    layers are alike, and the peak is in the first one's backward, while the embedding arrives: with its MLP, whose
    backward comes first, it is in the buffer of the all-gather, and a bucket of other weights is there too; later it is
    both in that buffer and in the weight. Beside a layer of more than two buckets nothing arrives before the MLP's
    weights are released.

    When a bucket of gradients is full, two copies of it are there for a moment: DeepSpeed's, and on a CPU gloo's. By
    then its weights and the layer's MLP, whose backward comes first, are released. Where nothing is gathered ahead, the
    embedding that is there twice takes as much, at another moment. Our engine has one copy on a GPU, which is less than
    what the allocator loses and is not counted; nor are those of layers in chunks.

    In files (`nvme`) are fp32 weights, moments and the step's gradients in fp32, which DeepSpeed reads and writes
    through four buffers of the largest group. A group ends with the tensor that fills `ON_DISK`: the largest is at
    least the largest tensor (and at most that and `ON_DISK`). Weights are read through five buffers of the largest
    tensor, and written through one that has room for the largest group of all ranks. A bucket's gradients are in fp32
    on the device before they are written. Pieces below 1 MiB stay in memory, which is not counted.

    Args:
        sizes: elements of the model.
        element: bytes of a weight on the device.
        bucket: elements of a bucket; by default `zero_bucket`, for our engine. A number means DeepSpeed's defaults:
            gradients are reduced on a stream of their own, whose two copies of the bucket the allocator keeps for it.
        reduced: bytes of an element in those copies; None: they are not counted.
        rounded: pinned host memory has powers of two (`devices.pins_exactly`).
    """

    def pinned(nbytes: int) -> int:
        return 1 << (nbytes - 1).bit_length() if rounded and nbytes else nbytes

    parameters = sizes.parameters
    trained = parameters if sizes.trainable is None else sizes.trainable
    shard, whole = -(-parameters // world), element * parameters
    part = -(-trained // world)
    buffer = element * (zero_bucket(parameters) if bucket is None else bucket)
    stage = run.engine.zero_stage
    away = run.engine.offload_optimizer and stage > 0
    optimizer = 12 * (part if stage else trained) - (0 if stage or element == 2 else 4 * trained)
    gradients = element * (part if stage >= 2 else trained)
    weights = sizes.packed or element * (shard if stage == 3 else parameters)
    leave = run.engine.offload_params and not sizes.packed
    alike = run.options.checkpoint and bool(run.options.offload)
    layer, table, live, ours = element * sizes.layer, element * sizes.embedding, 2 * buffer, bucket is None
    ahead = not ours or layer + table < live
    around = (1 + alike) * table
    if not ours:
        gathered = max(around + layer, live)
    elif not run.engine.prefetch:
        gathered = layer + (table * ahead if alike else buffer)
    else:
        gathered = table + live if ahead else around + (min(layer, live) if alike else layer)
    alone = world == 1 and not run.engine.offload_params  # what is gathered is the shard
    copies = 2 * min(buffer, whole) // element * (reduced or 0) if world > 1 or stage == 3 else 0
    largest = element * sizes.largest if away and stage < 3 else 0
    filed, paged = (where == "nvme" for where in (run.engine.offload_optimizer, run.engine.offload_params))
    largest_part, read = (-(-max(most, sizes.embedding) // world) for most in (sizes.largest, sizes.tensor))
    group = min(part, max(ON_DISK if filed and ours else SUB_GROUP, largest_part))
    in_layer = sizes.largest if sizes.largest > sizes.embedding else 0  # such as a layer's experts, in one tensor
    leaving = 4 * filed * min(part, max(buffer // element, in_layer) // world)
    device = {
        WEIGHTS: 0 if leave else weights,
        GATHERED: min(whole, gathered) if stage == 3 and not alone and not sizes.packed else 0,
        GRADIENTS: gradients if not away else largest + {1: element * trained, 2: largest}.get(stage, 0),
        OPTIMIZER: 0 if away else optimizer,
        BUCKETS: buffer if stage else 0,  # stages 1 and 2 fill it on a single rank too
        COPIES: (0 if ours else copies) + leaving,
    }
    whole_layers = run.options.chunk is None and run.block is None
    copied = ours and ahead and stage == 3 and copies and buffer < whole and whole_layers
    steps = [SUB_GROUP] * (part // SUB_GROUP) + [part % SUB_GROUP] if stage == 3 else [part]
    steps = [] if filed else steps
    earlier = element * part if stage in (1, 2) and (run.optim.accumulation > 1 or run.block) else 0
    host = {
        WEIGHTS: pinned(weights) if leave and not paged else 0,
        OPTIMIZER: (8 * part + (4 * part if stage == 3 else pinned(4 * part))) if away and not filed else 0,
        GRADIENTS: sum(map(pinned, (element * part, *(4 * n for n in steps), largest))) + earlier if away else 0,
        FILES: 16 * group * filed + element * (5 * read + world * group) * paged,
    }
    disk = {WEIGHTS: weights if leave and paged else 0, OPTIMIZER: 12 * part * filed, GRADIENTS: 4 * part * filed}
    head = max(table, live if ahead else 0)
    there = device[GATHERED]
    arriving = ahead and run.engine.prefetch and there
    first = alike and run.engine.prefetch and not ahead  # the peak may be in the first layer's backward
    others = {
        "attention": {GATHERED: min(there, whole - buffer), COPIES: copies + leaving} if copied else {},
        "mlp": {GATHERED: min(there, layer + (layer < live) * (table + buffer))} if first else {},
        "end": {GATHERED: min(there, layer)} if first and layer >= live else {},
        "forward": {GATHERED: min(whole, live) + min(whole, buffer), COPIES: 0} if arriving else {},
        "outside": {GATHERED: there and min(whole, head), COPIES: 0},  # gradients are reduced from the head's on
        "after": {} if away else {GATHERED: 0, **_after(stage, element, buffer, part if stage else trained, world)},
    }
    device, host, disk = ({n: b for n, b in of.items() if b} for of in (device, host, disk))
    return States(device, host, others, disk)


def _after(stage: int, element: int, buffer: int, own: int, world: int) -> dict[str, int]:
    """What an optimizer on the device holds after backward: it steps on `own` parameters of a rank."""
    stepping = (min(own, SUB_GROUP) if stage == 3 else own) * (4 * (element == 2) + element * (stage > 0))
    reducing = element * min(own, ZERO_DEFAULT) * (world > 1 and not stage)
    return {BUCKETS: buffer * (stage == 3), GRADIENTS: element * own + max(stepping, reducing)}
