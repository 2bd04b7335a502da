"""How fast GPUs are: a small table with sources, and measured rates that can replace it.

Rates are what kernels reach, not what data sheets promise. Attention rates count the causal half only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from alstlib.base.options import check_names
from alstlib.base.peaks import PEAKS, gpu_named, plain_name
from alstlib.base.units import GIB, parse_quantity


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one GPU (or of one rank on a CPU), in FLOPs and bytes per second."""

    name: str
    usable: float
    """Bytes that PyTorch finds on it."""
    capability: int
    """Compute capability, its first number: it decides which kernel attention runs."""
    matmul: float
    """Dense matrix products in bf16, at the sizes of a layer."""
    attention_forward: float
    attention_backward: float
    flash2_forward: float
    """flash-attn 2, which the ALST paper ran."""
    flash2_backward: float
    link: float
    """To another GPU of the node, one way."""
    network: float
    """To another node, each GPU's share, one way."""
    host: float
    """To the host's memory, one way."""
    host_memory: float = 20e9
    """The host's memory itself, each GPU's share: what an offloaded optimizer runs at."""
    peak: float = 0.0
    """FLOPs per second of the data sheet in bf16, dense: what an MFU is a share of; 0: not known."""
    node_gpus: int = 8
    """GPUs of a node that such GPUs are usually in."""
    node_host: int = 0
    """Bytes of that node's memory for each of its GPUs; 0: not known."""


GPUS: dict[str, Rates] = {
    name: Rates(name=name, peak=PEAKS[name], **{field: parse_quantity(value) for field, value in fields.items()})
    for name, fields in yaml.safe_load(Path(__file__).with_name("gpus.yaml").read_text()).items()
}
"""What is known of each kind of GPU. None was measured here; gpus.yaml has the sources, and `measured_rates` your own
rates."""
OTHER_NAMES = {
    "H100-80GB": "H100", "H200-141GB": "H200", "B200-180GB": "B200", "B200-192GB": "B200", "A100-80GB": "A100",
    "4090": "RTX4090", "RTX4090-24GB": "RTX4090", "GH200-96GB": "GH200", "GH200-480GB": "GH200",
}  # fmt: skip

LABELS = {24: 23.6, 40: 39.4, 48: 47.5, 64: 63.3, 80: 79.1, 96: 95.0, 141: 139.8, 180: 178.3, 192: 190.0}
"""GB on a label -> GiB that PyTorch finds, as such GPUs report; others are taken at 98.8%."""


def label_bytes(text: int | str) -> int:
    """Usable bytes of a GPU whose memory is named as on its label (`80GB`), or exactly (`79.1GiB`, a number).

    Raises:
        ValueError: no quantity.
    """
    nbytes = parse_quantity(text, "gpu_memory")
    if isinstance(text, str) and text.strip().upper().endswith("GB"):
        label = nbytes / 1e9
        return int(LABELS.get(round(label), 0.988 * label) * GIB)
    return nbytes


def rates_of(gpu: str) -> Rates:
    """A GPU's rates by its name: `RTX 4090`, `a100-80gb`.

    Raises:
        ValueError: a GPU that is not in the table, with the nearest that is.
    """
    known = {plain_name(name): of for name, of in [*zip(GPUS, GPUS), *OTHER_NAMES.items()]}
    name = known.get(plain_name(gpu), gpu)
    check_names({name: None}, GPUS, "gpu")
    return GPUS[name]


def rates_named(device: str) -> Rates | None:
    """Rates of a GPU by the name that its driver gives it (`NVIDIA A100-SXM4-40GB`); None where the table has none."""
    name = gpu_named(device)
    return None if name is None else GPUS.get(name) or GPUS.get(name.partition("-")[0])


def measured_rates(metrics: Mapping[str, Any]) -> Rates:
    """Rates from the metrics of `train.machine_rates`: of each, the slowest rank's.

    A link that was not measured (a single GPU, or a single node) is taken from the table where it has such a GPU, else
    from the copies between device and host.
    """
    slowest = {name: min(by_rank) for name, by_rank in metrics["rates"].items()}
    known = rates_named(metrics["device_name"])
    link = slowest.get("link") or (known.link if known else slowest["host"])
    alike = ("matmul", "attention_forward", "attention_backward", "host", "host_memory")
    return Rates(
        name=f"{metrics['device_name']} as measured", usable=metrics["gpu_memory"] or 0,
        capability=metrics["capability"], flash2_forward=slowest["attention_forward"],
        flash2_backward=slowest["attention_backward"], link=link,
        network=slowest.get("network") or (known.network if known else link), peak=known.peak if known else 0.0,
        **{name: slowest[name] for name in alike},
    )  # fmt: skip
