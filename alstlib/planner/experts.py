"""The tile of a block of experts, as `hf.experts` takes it. Without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from alstlib.config import RunConfig
from alstlib.planner.model_shapes import Shape
from alstlib.sizing import tile_for, tile_of_sums


def experts_tile(shape: Shape, rows: int, batch: int, element: int, device: str) -> int:
    """Tokens of a tile where none is named (`tile_of_sums`).

    Args:
        rows: tokens of a micro-batch row on a rank, or in a chunk.
        batch: micro-batch rows.
        element: bytes of a number.
        device: `cuda` or `cpu`.
    """
    width, wide, experts, routed = shape.width, shape.expert_mlp, shape.experts, shape.routed
    numbers = routed * (3 * wide + 2 * width) + experts + width
    if shape.expert_vectors:
        numbers += routed * (2 * experts + 2 * wide + width)
    if shape.shared_mlp:
        numbers += routed * 3 * (width + shape.shared_mlp)
    block = experts * (shape.expert + shape.expert_vectors + width) + 3 * width * shape.shared_mlp
    tile = tile_for(routed * max(2 * wide, width), element, device)
    return tile_of_sums(rows, tile, 4 * block, numbers * element * batch)


def tile_of_experts(shape: Shape, run: RunConfig, rows: int, element: int, device: str) -> int:
    """Tokens of a tile, of all micro-batch rows; 0 where all tokens are one, and in row chunks, which are one each."""
    rows, batch = rows // run.data.batch_size, run.data.batch_size
    if run.chunk is not None and run.chunk < rows:
        return 0
    tile = (
        experts_tile(shape, rows, batch, element, device)
        if run.options.tile("mlp") is True
        else int(run.options.tile("mlp"))
    )
    return tile * batch if tile < rows else 0


def in_one_tile(names: Iterable[str], sizes: Mapping[str, float], element: int) -> float:
    """Bytes that a moment takes more where all tokens of experts are one tile than where there is none: the gradients
    of all weights are there together, or the tile's input and its gradient. `names` are those of its terms."""
    terms = [name.split() for name in names]
    if ["E", "H", "I"] in terms:
        return element * sizes["E"] * sizes["H"] * sizes["I"]
    return 2 * element * sizes["H"] * sizes["R"] if any("T" in term for term in terms) else 0.0
