"""How fast GPUs are: a small table with sources, and measured rates that can replace it.

Rates are what kernels reach, not what data sheets promise. Attention rates count the causal half only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alstlib.options import check_names
from alstlib.units import parse_quantity

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


_H100 = Rates(
    name="H100", usable=79.1 * 2**30, capability=9, matmul=650 * T, attention_forward=607 * T,
    attention_backward=517 * T, flash2_forward=366 * T, flash2_backward=330 * T, link=450 * G, network=50 * G,
    host=50 * G,
)  # fmt: skip
GPUS: dict[str, Rates] = {
    "H100": _H100,
    "H200": replace(_H100, name="H200", usable=139.8 * 2**30),
    "A100": Rates(
        name="A100", usable=79.15 * 2**30, capability=8, matmul=250 * T, attention_forward=190 * T,
        attention_backward=165 * T, flash2_forward=190 * T, flash2_backward=165 * T, link=300 * G, network=25 * G,
        host=24 * G,
    ),
}  # fmt: skip
"""H100 (SXM): attention of width 128, causal, in bf16, from the FlashAttention-3 paper's benchmarks (cuDNN, which SDPA
reaches, and flash-attn 2); matrix products at two thirds of the 989 TFLOPS peak; NVLink 4; PCIe 5 x16 less protocol;
400 Gb/s of network a GPU. A100 (SXM): flash-attn 2's paper, 80% of 312 TFLOPS, NVLink 3, PCIe 4 x16, 200 Gb/s. None of
these was measured here; `with_measured` takes your own."""

LABELS = {24: 23.6, 40: 39.4, 48: 47.5, 64: 63.3, 80: 79.1, 96: 95.0, 141: 139.8, 192: 190.0}
"""GB on a label -> GiB that PyTorch finds, as such GPUs report; others are taken at 98.8%."""


def label_bytes(text: int | str) -> int:
    """Usable bytes of a GPU whose memory is named as on its label (`80GB`), or exactly (`79.1GiB`, a number).

    Raises:
        ValueError: no quantity.
    """
    nbytes = parse_quantity(text, "gpu_memory")
    if isinstance(text, str) and text.strip().upper().endswith("GB"):
        label = nbytes / G
        return int(LABELS.get(round(label), 0.988 * label) * 2**30)
    return nbytes


def rates_of(gpu: str) -> Rates:
    """A GPU's rates.

    Raises:
        ValueError: a GPU that is not in the table, with the nearest that is.
    """
    known = {name.lower(): name for name in GPUS}
    name = known.get(gpu.lower(), gpu)
    check_names({name: None}, GPUS, "gpu")
    return GPUS[name]


def rates_named(device: str) -> Rates | None:
    """Rates of a GPU by the name that its driver gives it; None where the table has none."""
    return next((rates for name, rates in GPUS.items() if name in device), None)


def with_measured(rates: Rates, path: str | Path) -> Rates:
    """These rates, with attention's from a result.json of `measure.time_kernels` that was measured on the machine."""
    found = json.loads(Path(path).read_text())
    metrics = found.get("metrics") or {}
    best = (metrics.get("kernels") or {}).get(metrics.get("chosen"), {})
    if "forward_tflops" not in best:
        raise ValueError(f"{path} has no measured kernel; name a result.json of alstlib.measure.time_kernels")
    return replace(
        rates, name=f"{rates.name}, attention as measured", attention_forward=best["forward_tflops"] * T,
        attention_backward=best["backward_tflops"] * T,
    )  # fmt: skip


def measured_rates(metrics: Mapping[str, Any]) -> Rates:
    """Rates from the metrics of `measure.machine_rates`: of each, the slowest rank's.

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
        host_memory=slowest["host_memory"],
    )  # fmt: skip
