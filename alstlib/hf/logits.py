"""What stands for the logits that are not kept."""

from __future__ import annotations

from typing import Any


class NotKept(ValueError, AttributeError):
    """Logits were read that are not kept. Also an AttributeError, so that `hasattr`, by which engines and libraries ask
    what an output is, finds nothing."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotKept(
        "an attached model that is given labels computes its logits tile by tile and keeps none. Use out.loss, "
        "alstlib.causal_lm_loss (with label_smoothing, for example) or alstlib.token_logps, which has the "
        "log-probability of each label; or call the model without labels for the logits of this rank's slice"
    )


class NoLogits:
    """Stands for the logits of a call with labels, and says so (NotKept) when it is used like a tensor."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies, pickles and libraries ask for these of every object
            raise AttributeError(name)
        _refuse()

    __getitem__ = __len__ = __array__ = __neg__ = __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = _refuse
    __torch_function__ = classmethod(_refuse)
