"""Find what a model does to its logits after the head, by running the model's own last lines on a small example; and
what stands for the logits that are not kept."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alstlib.tiled.logits import LogitTransform


class _Fixed(nn.Module):
    """A module that returns what it was given at its making, with the numbers of the one that it stands in for."""

    def __init__(self, value: Any, of: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: n for name, n in vars(of).items() if isinstance(n, int | float)})
        self.value, self.weight = value, torch.empty(0)  # a model may ask for the weight's dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.value


class _BodyOutput:
    """A body's output with a hidden state and None for everything else a model may look at."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


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

    def __repr__(self) -> str:
        return "NoLogits()"

    __torch_function__ = classmethod(_refuse)


_READS = """getitem len iter bool int float array neg add radd sub rsub mul rmul truediv rtruediv matmul rmatmul pow"""
for _name in _READS.split():
    setattr(NoLogits, f"__{_name}__", _refuse)


def find_transform(model: PreTrainedModel) -> LogitTransform | None:
    """The scale and soft cap that `model` applies to its head's logits, or None where it does something else.

    The model's forward runs with its body and head replaced (in a shallow copy) by stand-ins that return fixed
    values, so no weight is read. Candidates come from the config's fields and must reproduce what the model returns.
    """
    config = model.config.get_text_config()
    head, body = model.get_output_embeddings(), model._modules.get(model.base_model_prefix)
    names = [name for name, child in model._modules.items() if child is head]
    if body is None or not names:
        return None
    logits = torch.linspace(-50, 50, 2 * config.vocab_size).view(1, 2, config.vocab_size)
    hidden = torch.zeros(1, 2, config.hidden_size)
    shell = copy.copy(model)
    stand_ins = {model.base_model_prefix: _Fixed(_BodyOutput(hidden), body)}
    stand_ins.update({name: _Fixed(logits.clone(), head) for name in names})
    shell.__dict__["_modules"] = {**model._modules, **stand_ins}
    try:
        with torch.no_grad():
            made = type(model).forward(shell, input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False).logits
    except Exception:  # a forward with other needs than ours: unknown, and said so by the caller
        return None
    return next((c for c in _candidates(config) if _same(c(logits), made)), None)


def _candidates(config: Any) -> list[LogitTransform]:
    caps = [getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap")]
    scales = [1.0]
    for name in ("logit_scale", "lm_head_multiplier", "logits_scaling", "logits_scale"):
        if isinstance(value := getattr(config, name, None), int | float) and value:
            scales += [float(value), 1.0 / float(value)]
    return [LogitTransform(scale=s, softcap=c) for s in scales for c in (None, *(c for c in caps if c))]


def _same(a: Tensor, b: Any) -> bool:
    return isinstance(b, Tensor) and a.shape == b.shape and torch.allclose(a, b.to(a.dtype), rtol=1e-5, atol=1e-5)
