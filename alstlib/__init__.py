"""Arctic Long Sequence Training for Hugging Face models: sequence parallelism, tiled compute, checkpoint offload.

The public names are those of `__init__.pyi`, which editors read too. Each is imported when it is first used, so that
`import alstlib` takes no time.

Parts of a sequence have one name each, from large to small: a *slice* is what one rank holds of it; a *block*, the
tokens of a slice that go through the whole model before the next ones; a *chunk*, those that go through one layer
before the next ones; a *tile*, those that a token-wise function takes at a time. A *page* holds the keys and values of
some chunks or blocks of one layer. A *span* is a run of queries with the keys that they may see: a document's, in the
rows at hand. A *shard* is a rank's part of the weights.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
