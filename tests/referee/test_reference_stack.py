"""The reference stack's code under fake tensors makes what it makes with real ones."""

import contextlib

import pytest
import reference_stack
from reference_stack import ReferenceStack
from torch.utils import cpp_extension

from alstlib.base.config import RunConfig
from alstlib.base.options import Options

SMALL = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    "heads, ranks, mlp, loss, offload",
    [(2, 1, False, False, False), (2, 2, False, True, False), (2, 2, True, True, True), (1, 4, True, True, True)],
)
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
