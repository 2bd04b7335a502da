"""What attention takes in backward besides what a decoder's form has: a GPU's kernel for itself, windows that are put
together from pieces, scores that are capped. Without torch.

A form is that of one call of a kernel for all queries and keys. A kernel that takes windows itself (flash-attn, on
whole sequences) needs no more. Others get a window as causal triangles (`kernels.spans`): those whose queries and keys
are read backwards are copies, and what the calls make of a key is summed in fp32. Windows hide nothing of what a layer
keeps: its queries, keys and values are as long as without them.
"""

from __future__ import annotations

from alstlib.planner.model_shapes import Shape
from alstlib.sizing import kv_needed

FLASH_2 = ("flash", "flash_attention_2")
"""Kernels of flash-attn 2: PyTorch's and its own."""
FLASH_2_BLOCK = 128
"""Rows by which its sum of dQ is longer for each document."""
DOCUMENT = 1024
"""Tokens that a document of a packed sample is taken to have: how many there are is known when the data are read."""
ITSELF = ("cudnn", *FLASH_2, "flash_attention_3", "flash_attention_4")
"""Kernels (`backends.BACKENDS`) that take windows themselves, or leave them to one that does. Those that take soft caps
are among them."""
BLOCK = 32 * 2**20
"""Bytes of a block of scores (`kernels.blockwise`)."""
BLOCKS = 5
"""Such blocks at a time: scores, their slope, probabilities, gradients, and a product."""


def beside_form(
    shape: Shape, kernel: str, ranks: int, seq_len: int, rows: float, chunk: float | None, element: int
) -> float:
    """Bytes of one rank in the backward of attention, besides its form.

    Args:
        kernel: of core attention (`backends.BACKENDS`).
        rows: tokens of a rank.
        chunk: tokens of a chunk, where layers run in chunks.
        element: bytes of a number.
    """
    kv = ranks * max(kv_needed(shape.heads, shape.kv_heads, ranks))
    widths = shape.head_dim + shape.value_dim
    keys = kv * widths
    each = shape.heads * shape.head_dim + keys  # numbers of a token in gradients of queries, keys and values
    in_window = bool(shape.windowed) and shape.window < seq_len
    called = rows if chunk is None else chunk
    capped = 4.0 * keys * called + BLOCKS * BLOCK if shape.softcap and kernel not in ITSELF else 0.0
    if not in_window or (chunk is None and kernel in ITSELF):
        return capped
    backwards = called if chunk is not None else rows * (1 - shape.window / seq_len)
    copies = (element * (shape.heads * widths + keys) + 4 * shape.heads) * backwards
    made = element * each * backwards
    if capped:
        made = max(made, capped + element * shape.heads * shape.value_dim * backwards)
    sums = 4.0 * each * rows if chunk is None else 0.0
    return copies + made + sums


def kernel_workspace(shape: Shape, kernel: str, rows: float, packed: bool = False) -> float:
    """Bytes that a GPU's attention backward takes for itself: dQ summed in fp32 (flash-attn and cuDNN both), and with
    flash-attn 2 the gradients of keys and values of each query head, before they are summed. cuDNN leaves the documents
    of `packed` samples to flash-attn 2, whose dQ is longer by a block for each document."""
    if kernel == "blockwise":
        return 0.0
    queries = rows * shape.heads * shape.head_dim
    documents = packed and kernel in ("cudnn", *FLASH_2)
    expanded = (kernel in FLASH_2 or documents or shape.windowed) and shape.kv_heads < shape.heads
    more = FLASH_2_BLOCK / DOCUMENT * queries if documents else 0
    return 4 * (queries + more) + (2 * 2 * queries if expanded else 0)


def latent_sizes(shape: Shape) -> dict[str, float]:
    """Widths of latent attention, by the names that they have in forms (`measure.forms.LATENT`)."""
    if (latent := shape.latent) is None:
        return {}
    keys, values, positions = shape.head_dim, latent.values, latent.positions
    return {
        "e": positions / 2, "o": (keys - positions) / 2, "v": values / 2, "w": (keys - positions + values) / 4,
        "x": keys + values / 2, "z": (keys + values) / 6, "j": latent.keys, "s": latent.keys + positions,
        "y": latent.queries,
    }  # fmt: skip
