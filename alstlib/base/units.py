"""Quantities: how they are read (`3.7M`, `80GB`) and written (`1:47:35`), and the label of tokens without loss."""

from __future__ import annotations

import re

GIB = 2**30
IGNORE = -100
"""Label of a token without loss, as in torch.nn.functional.cross_entropy."""
_UNITS = {
    "": 1, "B": 1,
    "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def parse_quantity(value: int | float | str, what: str = "value") -> int:
    """Read `3.7M` (decimal tokens), `80GB` (decimal bytes), `64GiB` (binary bytes) or a whole number as an integer.

    Raises:
        ValueError: the text is not a whole number, nor a number with one of the known units.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(value).replace("_", ""))
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (unit == 1 and float(match[1]) % 1):
        raise ValueError(
            f"{what}={value!r} is not a number with a unit (such as 3.7M, 80GB or 64GiB) or a whole number"
        )
    return round(float(match[1]) * unit)


def format_tokens(n: int) -> str:
    """`500K`, `3.7M` (decimal), or all digits (`2,048`) where the short form would round."""
    for unit, size, digits in (("M", 10**6, 2), ("K", 10**3, 1)):
        if size <= n < size * 1000 and round((short := round(n / size, digits)) * size) == n:
            return f"{short:g}{unit}"
    return f"{n:,}"


def format_bytes(n: float) -> str:
    """Binary units: `1.50 GiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"


def format_seconds(seconds: float) -> str:
    """`350 ms`, `12.3 s`, and from a minute on `h:mm:ss`."""
    if seconds >= 59.95:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{seconds * 1000:.0f} ms"


def printable(text: str) -> str:
    """`text` with spaces in place of what is not printable: in a terminal, control characters are commands to it."""
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)
