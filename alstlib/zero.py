"""What DeepSpeed ZeRO holds of a model on a rank, in bytes, and how large its buckets are made. Without torch.

(Rajbhandari et al., 2020, arXiv 1910.02054; DeepSpeed 0.19.8.)
"""

from __future__ import annotations

from dataclasses import dataclass

from alstlib.config import RunConfig

ZERO_DEFAULT = 500_000_000
"""Elements of DeepSpeed's buckets where nothing is said, as in the paper; up to twice as many stay gathered."""
COPIES = "copies of buckets"
"""What exists only while gradients of layers are reduced."""


def zero_bucket(parameters: int) -> int:
    """Elements of ZeRO's buckets as our runs set them: a sixteenth of the model, between 1M and 200M."""
    return max(1_000_000, min(200_000_000, parameters // 16))


@dataclass(frozen=True)
class States:
    """A rank's model states and ZeRO's buffers, by name. Bytes."""

    device: dict[str, int]
    host: dict[str, int]

    def at(self, in_a_layer: bool) -> dict[str, int]:
        """The device's, while memory peaks in a layer or outside (the head's gradients are the first to be reduced)."""
        return {name: nbytes for name, nbytes in self.device.items() if in_a_layer or name != COPIES}


def model_states(
    run: RunConfig, parameters: int, largest: int, world: int, element: int, bucket: int | None = None,
    reduced: int | None = None,
) -> States:  # fmt: skip
    """What a model of so many `parameters` takes on each of `world` ranks.

    ZeRO keeps fp32 weights and AdamW's two moments (12 bytes a parameter). With the optimizer on the host, gradients
    go there too, with an fp32 copy for its step. Under stage 3 a device holds its shards, the bucket in which
    gradients are reduced and, in layers' backward, two copies of it, and the weights that are gathered: DeepSpeed's
    limit of two buckets (`engine.zero_config`), or the largest module.

    Args:
        largest: elements of the largest module that is gathered as one.
        element: bytes of a weight on the device.
        bucket: elements of a bucket; by default `zero_bucket`.
        reduced: bytes of an element while gradients are reduced; by default `element`.
    """
    shard, whole = -(-parameters // world), element * parameters
    buffer = element * (zero_bucket(parameters) if bucket is None else bucket)
    stage = run.zero_stage
    away = run.offload_optimizer and stage > 0
    optimizer = 12 * (shard if stage else parameters) - (0 if stage or element == 2 else 4 * parameters)
    gradients = element * (shard if stage >= 2 else parameters)
    weights = element * (shard if stage == 3 else parameters)
    reduces = world > 1 or stage == 3
    device = {
        "weights": 0 if run.offload_params else weights,
        "gathered weights": min(whole, max(2 * buffer, element * largest)) if stage == 3 else 0,
        "gradients": gradients if not away else whole if stage == 1 else 0,
        "optimizer": 0 if away else optimizer,
        "buckets": buffer if reduces else 0,
        COPIES: 2 * min(buffer, whole) // element * (reduced or element) if reduces else 0,
    }
    host = {
        "weights": weights if run.offload_params else 0,
        "optimizer": optimizer if away else 0,
        "gradients": (element + 4) * shard if away else 0,
    }
    return States({n: b for n, b in device.items() if b}, {n: b for n, b in host.items() if b})
