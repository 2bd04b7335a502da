"""Shapes of models for which a plan needs no download: small ones with random weights, and published ones. They lie in
`public_models.json`, as a model's config has them."""

from __future__ import annotations

import json
from pathlib import Path

from alstlib.base.options import Json

_READ: Json = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SHAPES: dict[str, Json] = _READ["shapes"]
"""Shapes of Llama models with random weights. `small` shows every row's effect on a laptop's CPU."""
PUBLIC: dict[str, Json] = _READ["public"]
"""Published shapes by hub name (their variants for instructions are alike)."""
TRAINED: dict[str, int] = _READ["trained"]
"""`max_position_embeddings` of published models, as their configs have it: a shape does not depend on it."""
