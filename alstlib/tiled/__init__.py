"""Token-wise functions in sequence tiles, so that intermediates do not grow with the sequence (ALST, section 3.1).

In the order in which to read it: `compute` has the operator, and the modules that stand in for an MLP or a norm; `loss`
the cross-entropy of a language-model head without its logits; `skip` finds what a recompute need not compute.
"""

from alstlib import face

__getattr__, __all__ = face(__name__, {
    "compute": ["TiledMLP", "TiledNorm", "default_tile", "tiled_compute"],
    "loss": ["LogitTransform", "TiledHead", "tiled_logits_loss"],
})  # fmt: skip
