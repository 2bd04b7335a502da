"""Layers streamed in chunks: in O(chunk) memory, no work in vain, refused where rows cannot be cut. The net of
whole steps (tests/matrix.py) has their gradients."""

import functools

import pytest
import torch
import yaml
from cases import attach, batch, check_refused, growth, make_model, passes, step
from torch import nn

from alstlib.base.mesh import SPContext
from alstlib.hf.pass_state import PassState, StepInputs
from alstlib.kernels import paged
from alstlib.offload.host_store import HostStore
from alstlib.streaming.chunked import Stream

# ----- a whole model


OFTEN = yaml.safe_load("""
[[gqa, true, 2], [gqa, 4, 2], [qwen3, true, 2], [gpt2, 4, 2], [gemma2, true, 2], [gemma2, 4, 2.9]]
""")
"""Models, the MLP's tile, and how often the MLP runs."""


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("kind, tile, mlp", OFTEN)
def test_what_runs_how_often(monkeypatch, kind, tile, mlp, save):
    """Attention once or twice; the MLP twice, even where its output is normalised, unless tiles are smaller than the
    chunk there; projections of all but the last chunk once more, for their keys and values."""
    model, rows, kernel = make_model(kind), [0], paged.forward
    monkeypatch.setattr(paged, "forward", lambda *a, **kw: (rows.append(a[1].shape[2]), kernel(*a, **kw))[1])
    found = passes(monkeypatch, model)
    with attach(model, tiles={"mlp": tile, "loss": True, "norm": True}, save_attention=save, chunk=6):
        for _ in range(2):  # the first step learns the layers
            rows.clear()
            for counts in found.values():
                counts[:] = [0, 0]
            step(model, batch())
    per_row = [n / 20 / 2 for n in (sum(rows), sum(found["mlp"]), sum(found["query"]))]
    assert per_row == [1 if save else 2, mlp, 2 + 18 / 20]


@pytest.mark.slow
def test_working_memory_is_of_the_chunk():
    """From 128 to 256 rows the peak grows by what stays whole: layer input, output, gradients, keys and values (and
    their fp32 gradients); nothing of the MLP, queries or norms, and no attention outputs, which wait on the host."""
    width, kv = 32, 16  # two key/value heads of 8
    build = functools.partial(make_model, num_hidden_layers=3, intermediate_size=256)
    how = {"tiles": {"loss": 64, "norm": True}, "offload": "sync", "save_attention": True, "build": build}
    # per row: x (turns into its gradient), the gradient that came in, K, V, dK, dV, cos and sin, tokens and labels
    whole = 4 * (2 * width + 2 * kv + 2 * kv + 2 * 8) + 5 * 8
    grown = growth(128, 256, chunk=64, **how)
    assert grown < 1.1 * whole, (grown, whole)
    assert growth(128, 256, **how) > 3 * grown  # the reading can fail


# ----- refusals


def refused(rank, world):
    ctx, model = SPContext.create(world), make_model()
    shard = {k: v for k, v in batch(24, world=world, rank=rank).items() if not k.endswith("tokens")}
    embeds = model.model.embed_tokens(shard["input_ids"]).detach()
    with attach(model, ctx, chunk=5):
        for says, wrong in {
            r"no other values of tokens \(inputs_embeds\)": {"input_ids": None, "inputs_embeds": embeds},
            "give input_ids and position_ids with shift_labels": {"shift_labels": None},
            r"\(output_hidden_states\)": {"output_hidden_states": True},
            r"\(own_tensor\)": {"own_tensor": embeds},
        }.items():
            check_refused(says, model, **{k: v for k, v in {**shard, **wrong}.items() if v is not None})


def test_calls_whose_rows_cannot_be_dealt_out(ranks2):
    ranks2(refused)


def test_layers_that_cannot_be_streamed(monkeypatch):
    model = make_model()
    layer = model.model.layers[1]
    attend = layer.self_attn.forward

    def twice(*args, **kwargs):
        attend(*args, **kwargs)
        return attend(*args, **kwargs)

    with attach(model, chunk=6):
        layer.self_attn.forward = twice
        check_refused("calls attention more than once cannot run in chunks; use chunk=None", step, model, batch())
    del layer.self_attn.forward
    running = PassState(inputs=StepInputs(shape=(1, 20), device=torch.device("cpu")))
    with attach(model, chunk=6) as handle, handle.entered(running):
        check_refused(
            r"takes an input \[20, 3, 2\] that cannot be cut into chunks",
            layer,
            torch.randn(1, 20, 32),
            extra=torch.ones(20, 3, 2),
        )
        check_refused(
            r"\[20\] with a gradient, which has no dimension of tokens",
            layer,
            torch.randn(1, 20, 32),
            extra=torch.ones(20, requires_grad=True),
        )
    monkeypatch.setattr(layer, "forward", lambda hidden_states: hidden_states)
    check_refused(r"layer 1 \(LlamaDecoderLayer\) takes no cache", attach, model, chunk=6)


def test_a_layer_without_attention():
    layer = nn.Linear(4, 4)
    stream = Stream(
        run=lambda x, _: layer(x), chunk=2, ranks=1, device=layer.weight.device, store=HostStore(), keep=False,
        module=layer,
    )  # fmt: skip
    (out,) = stream(torch.randn(1, 5, 4))
    check_refused("did not call attention", out.sum().backward)
