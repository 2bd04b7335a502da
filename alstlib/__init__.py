"""Arctic Long Sequence Training for Hugging Face models: sequence parallelism, tiled compute, checkpoint offload.

The public names are those of `__init__.pyi`, which editors read too. Each is imported when it is first used, so that
`import alstlib` takes no time.

One word has one meaning. A micro-batch has *samples*; a sample has one or more *documents*, whose offsets are
`cu_seqlens`. Parts of a sequence, from large to small: a *slice* is what one rank holds of it; a *block*, the tokens of
a slice that go through the whole model before the next ones (`block_step`); a *chunk*, those that go through one layer
before the next ones; a *tile*, those that a token-wise function takes at a time. A *page* holds the keys and values of
some chunks or blocks of one layer. A *span* is a run of queries with the keys that they may see: those of one document.
A *shard* is a rank's part of the weights.

Attention has *queries* and *keys*, everything else has *tokens*. A *row* belongs to a table: the ablation, a sweep, or
a data set. The *state* of a layer is what a recurrence carries from token to token. Other states are named with their
kind: hidden states, optimizer states, model states (of ZeRO), random state, training state (of a run), and `PassState`,
which says what a pass over the model was given. Names of others stay as they are: blockwise attention, and `chunk_size`
of recurrences, the tokens that a kernel works on at a time.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
