"""The reference stack's code under fake tensors makes what it makes with real ones."""

import contextlib

import pytest
import reference_stack
from cases import values_of
from reference_stack import ReferenceStack
from torch.utils import cpp_extension

from alstlib.base.config import RunConfig
from alstlib.base.options import Options

SMALL = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 8,
}  # fmt: skip


STEPS = """
2 -> 1 -> false -> false -> false
2 -> 2 -> false -> true  -> false
2 -> 2 -> true  -> true  -> true
1 -> 4 -> true  -> true  -> true
"""


@pytest.mark.parametrize("heads, ranks, mlp, loss, offload", values_of(STEPS))
def test_real_tensors_at_small_sizes(heads, ranks, mlp, loss, offload, monkeypatch):
    """The same moments, to the byte and the category. Nothing of DeepSpeed is compiled, which takes a minute."""
    monkeypatch.setattr(cpp_extension, "load", lambda *_, **__: pytest.fail("an operator is compiled"))
    options = Options.plain(tiles={"mlp": mlp, "loss": loss, "norm": False}, offload=offload)
    model = {"name": "tiny", "config": {**SMALL, "num_key_value_heads": heads}, "dtype": "bf16"}
    stack = ReferenceStack(RunConfig(model=model, options=options), ranks)
    fake = stack.at(77 * ranks)
    monkeypatch.setattr(reference_stack, "FakeTensorMode", lambda **_: contextlib.nullcontext())
    real = stack.at(77 * ranks)
    assert (real.device_peak, real.categories) == (fake.device_peak, fake.categories)
    moments, others = (
        {(key.partition("|")[0], frozenset(at.items())) for key, at in found.moments.items()} for found in (real, fake)
    )
    assert moments == others
    assert len(fake.moments) > 20
