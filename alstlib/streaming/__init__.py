"""Layers whose rows come in chunks, so that working memory does not grow with the sequence.

`chunked` runs a decoder layer chunk by chunk over one growing set of keys and values.
"""

from alstlib import face

__getattr__, __all__ = face(__name__, {
    "chunked": ["RowChunk", "Stream"],
})  # fmt: skip
