"""How fast GPUs are: a small table with sources, and measured rates that can replace it.

Rates are what kernels reach, not what data sheets promise. Attention rates count the causal half only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from alstlib.base.options import check_names
from alstlib.base.peaks import PEAKS, gpu_named, plain_name
from alstlib.base.units import GIB, parse_quantity

T = 10**12
G = 10**9


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
    host_memory: float = 20 * G
    """The host's memory itself, each GPU's share: what an offloaded optimizer runs at."""
    peak: float = 0.0
    """FLOPs per second of the data sheet in bf16, dense: what an MFU is a share of; 0: not known."""
    node_gpus: int = 8
    """GPUs of a node that such GPUs are usually in."""
    node_host: int = 0
    """Bytes of that node's memory for each of its GPUs; 0: not known."""


_H100 = Rates(
    name="H100", usable=79.1 * GIB, capability=9, matmul=650 * T, attention_forward=607 * T,
    attention_backward=517 * T, flash2_forward=366 * T, flash2_backward=330 * T, link=450 * G, network=50 * G,
    host=50 * G, peak=PEAKS["H100"], node_host=237_500_000_000,
)  # fmt: skip
_A100 = Rates(
    name="A100", usable=79.15 * GIB, capability=8, matmul=250 * T, attention_forward=190 * T,
    attention_backward=165 * T, flash2_forward=190 * T, flash2_backward=165 * T, link=300 * G, network=25 * G,
    host=24 * G, peak=PEAKS["A100"], node_host=144 * GIB,
)  # fmt: skip
GPUS: dict[str, Rates] = {
    "H100": _H100,
    "H200": replace(_H100, name="H200", usable=139.8 * GIB, node_host=231 * GIB),
    "B200": Rates(
        name="B200", usable=178.3 * GIB, capability=10, matmul=1480 * T, attention_forward=1230 * T,
        attention_backward=1050 * T, flash2_forward=366 * T, flash2_backward=330 * T, link=900 * G, network=50 * G,
        host=50 * G, peak=PEAKS["B200"], node_host=256 * GIB,
    ),
    "A100": _A100,
    "A100-40GB": replace(_A100, name="A100-40GB", usable=39.4 * GIB, node_host=85 * G),
    "RTX4090": Rates(
        name="RTX4090", usable=23.6 * GIB, capability=8, matmul=132 * T, attention_forward=100 * T,
        attention_backward=87 * T, flash2_forward=100 * T, flash2_backward=87 * T, link=12 * G, network=3 * G,
        host=24 * G, peak=PEAKS["RTX4090"], node_host=48 * G,
    ),
    "GH200": replace(
        _H100, name="GH200", usable=95.0 * GIB, host=297 * G, host_memory=120 * G, node_gpus=1, node_host=432 * GIB
    ),
}  # fmt: skip
"""None of these was measured here; `measured_rates` has your own.

H100 (SXM): attention of width 128, causal, in bf16, from the FlashAttention-3 paper's benchmarks (cuDNN, which SDPA
reaches, and flash-attn 2); matrix products at two thirds of the 989 TFLOPS peak; NVLink 4; PCIe 5 x16 less protocol;
400 Gb/s of network for each GPU. Node: the ALST paper's, 1.9 TB for 8 GPUs. H200: the same chip; Azure's ND H200 v5,
1,850 GiB. A100 (SXM): flash-attn 2's paper, 80% of 312 TFLOPS, NVLink 3, PCIe 4 x16, 200 Gb/s; AWS's p4de, 1,152 GiB;
with 40 GB, Google's a2-highgpu, 85 GB for each GPU. B200: the forward of cuDNN 9.13, which the FlashAttention-4 paper
(arXiv 2603.05451) says is 1.3 times slower than its 1,605 TFLOPS; no figures for the backward and for flash-attn 2,
which take the H100's proportion and rates; two thirds of 2,250 TFLOPS; NVLink 5, 178.3 GiB as CUDA reports
(pytorch/ao, pull request 4002); AWS's p6-b200, 2 TiB. RTX4090: 165 TFLOPS with sums in fp32 (NVIDIA's Ada white paper),
in the A100's proportions; GPUs of a node reach each other through the host, at half of PCIe 4 x16; 25 Gb/s; fal.ai's
machines, 48 GB for each GPU. GH200 (96 GB): an H100 whose host is at the end of NVLink-C2C, 297 GB/s to the host as
measured in arXiv 2407.07850; a quarter of the 500 GB/s of its memory, which is the share that the others have of
theirs; a node of one, Lambda's, 432 GiB."""
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
        label = nbytes / G
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
    return Rates(
        name=f"{metrics['device_name']} as measured", usable=metrics["gpu_memory"] or 0,
        capability=metrics["capability"], matmul=slowest["matmul"], attention_forward=slowest["attention_forward"],
        attention_backward=slowest["attention_backward"], flash2_forward=slowest["attention_forward"],
        flash2_backward=slowest["attention_backward"], link=link,
        network=slowest.get("network") or (known.network if known else link), host=slowest["host"],
        host_memory=slowest["host_memory"], peak=known.peak if known else 0.0,
    )  # fmt: skip
