"""Layers that mix tokens by a short convolution alone (LFM2)."""

from __future__ import annotations

from alstlib.linear.adapter import Adapter


class ShortConv(Adapter):
    family, heads = "short convolution", False
