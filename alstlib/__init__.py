"""Arctic Long Sequence Training for Hugging Face models: sequence parallelism, tiled compute, checkpoint offload.

The public names are those of `__init__.pyi`, which editors read too. Each is imported when it is first used, so that
`import alstlib` takes no time.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
