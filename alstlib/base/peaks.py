"""What data sheets say GPUs compute at most, and which GPU a name means. This module does not import torch."""

from __future__ import annotations

import re

PEAKS: dict[str, float] = {
    "H100": 989e12, "H100-PCIe": 756e12, "H100-NVL": 835e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12,
    "A100-40GB": 312e12, "RTX4090": 165e12, "GH200": 989e12,
}  # fmt: skip
"""FLOPs per second of a GPU in bf16, dense, with sums in fp32: what an MFU is a share of."""


def plain_name(name: str) -> str:
    """A GPU's name without what people and drivers write differently."""
    return re.sub(r"nvidia|geforce|sxm\d?|[^a-z0-9]", "", name.lower())


def gpu_named(device: str) -> str | None:
    """The key in `PEAKS` of a GPU by the name that its driver gives it (`NVIDIA A100-SXM4-40GB`); None where it has
    none. A digit after it makes another GPU of it (`A1000`)."""
    plain = device.lower().replace("rtx ", "rtx")
    found = [name for name in PEAKS if all(re.search(rf"{word}(?!\d)", plain) for word in name.lower().split("-"))]
    return max(found, key=len) if found else None
