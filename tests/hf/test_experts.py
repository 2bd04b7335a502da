"""MoE layers in tiles: their router's outputs and loss, left as they are where they mix tokens, O(tile). The net
of whole steps (tests/matrix.py) has their gradients."""

import gc

import pytest
import torch
import yaml
import zoo
from cases import (
    attach,
    check_attached,
    check_refused,
    check_step,
    make_model,
    on_ranks,
    own_step,
    sample_of,
    step,
)
from operators import peaks
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import alstlib
from alstlib.base.sizing import TILE_BYTES, as_on
from alstlib.hf.experts import TiledExperts

HOW = yaml.safe_load("""
checkpoints: {tiles: &three {mlp: 3, loss: true, norm: true}}
no checkpoints: {tiles: *three, checkpoint: false}
tiles in chunks: {tiles: *three, chunk: 5}
a token: {tiles: {<<: *three, mlp: 1}}
""")
THREE = HOW["checkpoints"]["tiles"]
LENGTH = 17


def sample(rows=1):
    return sample_of(LENGTH, rows, documents=[LENGTH])


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_routers_logits_are_those_of_the_whole_slice(name):
    """Without labels transformers collects them itself: one entry for each layer, with the tokens in order."""
    model, ids = zoo.build(name), sample(2)["input_ids"]
    want = model(ids, output_router_logits=True)
    with attach(model, tiles=THREE), torch.no_grad():
        got = model(ids, output_router_logits=True)
    torch.testing.assert_close(got.router_logits, want.router_logits, atol=1e-5, rtol=1e-5)
    assert got.aux_loss.item() == pytest.approx(want.aux_loss.item(), rel=1e-6)


@pytest.mark.parametrize("how", HOW)
def test_a_balance_without_a_graph_is_not_left_out(how):
    """A loss of the user's own, of logits and of the routers' balance, would have no gradient of the second part."""
    model, ids = zoo.build("mixtral"), sample()["input_ids"]
    with attach(model, **HOW[how]):
        check_refused("keep no graph of the router's logits. Give labels", model, ids, output_router_logits=True)
        with torch.no_grad():
            assert model(ids, output_router_logits=True).aux_loss > 0


def test_a_balance_with_a_graph_has_its_gradient():
    model, ids = zoo.build("mixtral"), sample()["input_ids"]

    def balance():
        return own_step(model, input_ids=ids, output_router_logits=True, of="aux_loss")

    want = balance()
    with attach(model, checkpoint=False, tiles={"loss": True, "norm": True}):
        check_step(balance(), want)


# ----- what is computed


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_recompute_does_not_run_experts_in_vain(name):
    """Six tiles in forward and six in backward; gpt-oss's block returns its router's scores too, which nobody reads."""
    model, calls = zoo.build(name), []
    with attach(model, tiles=THREE):
        step(model, sample())
        model.model.layers[1].mlp.experts.register_forward_hook(lambda *_: calls.append(1))
        step(model, sample())
    assert len(calls) == 12


class Reading(GptOssDecoderLayer):
    """A layer that weights what its experts made once more by the scores with which they were chosen."""

    def forward(self, hidden_states, **kwargs):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden = hidden_states + attended
        routed, scores = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + routed * scores.view(*hidden.shape[:2], -1)[..., :1]


def test_further_outputs_that_a_layer_reads_are_computed():
    """Their gradient counts, and a recompute has them."""
    model = zoo.build("gpt_oss")
    for layer in model.model.layers:
        layer.__class__ = Reading
    check_attached(model, sample(), tiles=THREE)


def test_the_tile_counts_the_experts_of_a_token(monkeypatch):
    monkeypatch.setitem(TILE_BYTES, "cpu", 4 * 2 * 96 * 512)
    block = zoo.build("mixtral").model.layers[0].mlp
    assert TiledExperts(block, None)._default_tile(torch.zeros(1, 4096, 32)) == 512
    for samples in (2, 8):  # which a tile holds the tokens of
        assert TiledExperts(block, None)._default_tile(torch.zeros(samples, 4096 // samples, 32)) == 512


@pytest.mark.parametrize("dtype, worth", [(torch.float32, 56), (torch.bfloat16, 112)])
def test_the_default_tile_takes_no_more_than_the_block_untiled(dtype, worth):
    """All experts' gradients are summed in fp32 over tiles: as much as the intermediates of so many tokens. A slice of
    up to twice as many is one tile, whose gradients are not copied to fp32."""
    block = zoo.build("mixtral", intermediate_size=192).model.layers[0].mlp.to(dtype)

    def peak(rows, module):
        x = torch.randn(1, rows, 32, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        block.zero_grad()
        gc.collect()  # models of earlier tests, which would be freed in between
        return peaks(module, x)[1]

    ours = TiledExperts(block, None)
    peak(9, ours)
    with as_on("cpu", tiles=lambda width, element_bytes: 1):  # tiles as small as they may be
        for rows in (worth // 2, 2 * worth, 2 * worth + 1, 8 * worth):
            tiled, whole = peak(rows, ours), peak(rows, block)
            assert tiled <= whole + 2 * rows * 32 * dtype.itemsize, rows
        assert tiled < 0.5 * whole


# ----- blocks that mix tokens


class Block(nn.Module):
    """A user's own."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList([nn.Linear(32, 32)])

    def forward(self, hidden_states):
        return self.experts[0](hidden_states) * self.gate(hidden_states).softmax(-1)[..., :1]


class ByToken(Block):
    def forward(self, hidden_states, tokens=None):
        return super().forward(hidden_states)


def with_blocks(kind):
    model = make_model()
    for layer in model.model.layers:
        layer.mlp = kind()
    return model


UNKNOWN = "may mix tokens (see Options.experts_by_token)"


@pytest.mark.parametrize(
    "kind, says, left",
    [(Block, True, ""), (Block, False, UNKNOWN), (ByToken, True, "routes to experts by more than its tokens")],
)
def test_blocks_that_may_mix_tokens_are_left_as_they_are(kind, says, left, caplog):
    """Unless the user says that they do not: then they run in tiles."""
    model = with_blocks(kind)
    handle = check_attached(model, sample(), tiles=THREE, experts_by_token=says)
    with attach(model, tiles=THREE, experts_by_token=says):
        assert [isinstance(layer.mlp, TiledExperts) for layer in model.model.layers] == [not left] * 2
    assert handle.notes == [f"layer {i}: mlp ({kind.__name__}) {left}: left untiled" for i in range(2) if left]
    assert {r.message for r in caplog.records if r.name.startswith("alstlib.hf")} == set(handle.notes)


def refused(rank, world):
    says = r"layer 0: mlp \(Block\) routes tokens to experts, and may mix them: .*Options\(experts_by_token=True\)"
    ctx = alstlib.SPContext.create(world)
    check_refused(says, attach, with_blocks(Block), ctx, chunk=None if world > 1 else 5)


@pytest.mark.parametrize("world", [1, 2])
def test_blocks_that_may_mix_tokens_are_refused_for_some_of_the_rows(pools, world):
    """Of a rank, of a chunk, and of a block of the model."""
    on_ranks(pools, world, refused)
    with attach(with_blocks(Block)) as handle:
        check_refused(r"may mix them: .*run by blocks", step, handle.model, sample(), block=5)


def test_experts_that_a_layer_calls_itself_are_said():
    """Gemma 4's layer has an MLP, a router and experts side by side."""
    fields = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48, "global_head_dim": 16}
    model = zoo.small(
        "Gemma4TextConfig", **fields, enable_moe_block=True, hidden_size_per_layer_input=0, head_dim=8,
        layer_types=zoo.LAYER_TYPES,
    )  # fmt: skip
    assert check_attached(model, sample(), tiles=THREE).notes == [
        f"layer {i}: experts (Gemma4TextExperts) is not inside its MLP: left untiled" for i in range(2)
    ]


# ----- ZeRO-3


@pytest.mark.parametrize("how", ["class", "name"])
def test_engines_find_the_blocks_by_their_class(how):
    """As leaves of DeepSpeed ZeRO-3, which some name after `apply` (Accelerate does, by the name of the class)."""
    from accelerate.utils.dataclasses import get_module_class_from_name
    from deepspeed.utils import set_z3_leaf_modules

    model = zoo.build("mixtral")
    with attach(model) as handle:
        kind = MixtralSparseMoeBlock if how == "class" else get_module_class_from_name(model, "MixtralSparseMoeBlock")
        blocks = [layer.mlp for layer in handle.facts.layers]
        assert set_z3_leaf_modules(model, [kind]) == blocks
        assert all(isinstance(mlp, TiledExperts) and mlp._z3_leaf for mlp in blocks)
    assert {type(layer.mlp) for layer in model.model.layers} == {MixtralSparseMoeBlock}
