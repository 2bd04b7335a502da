"""Arctic Long Sequence Training for Hugging Face models: sequence parallelism, tiled compute, checkpoint offload.

The public face; names load on first use, so that `import alstlib` costs nothing.
"""

from alstlib.face import face

__version__ = "0.1.0"
__getattr__, __all__ = face(__name__, {
    "config": ["ROWS", "RunConfig"], "mesh": ["SPContext"], "data.loader": ["SPDataLoader"],
    "hf.handle": ["Handle", "Options"], "hf.attach": ["apply"], "hf.causal_lm_loss": ["Loss", "causal_lm_loss"],
    "train.engine": ["zero_config"],
})  # fmt: skip


def __dir__() -> list[str]:
    return __all__
