"""Tiled compute against the untiled function, and TiledMLP against the modules that it stands in for."""

import copy

import pytest
import torch
from operators import DTYPES, EXACT, LAYOUTS, agree, error_of, leaf, peaks, randn, randomised, worst
from operators import of_module as run
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from alstlib.base.recompute import Pass, entered
from alstlib.base.sizing import TILE_BYTES, default_tile
from alstlib.tiled.compute import TiledMLP, TiledNorm, tiled_compute

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

WIDTH = 6


def mlp_function(x, w1, b1, w2):
    return F.gelu(x @ w1 + b1) @ w2


def weights_of(out=WIDTH):
    return [randn(*s, seed=10 + i).requires_grad_() for i, s in enumerate([(WIDTH, 11), (11,), (11, out)])]


def tiled(fn, tile):
    """fn(x, *params) in tiles."""
    return lambda x, *params: tiled_compute(lambda part: fn(part, *params), x, params, tile=tile)


def inputs_of(batch=2, rows=7, out=WIDTH):
    """x and the weights of `mlp_function`."""
    return [randn(batch, rows, WIDTH).requires_grad_(), *weights_of(out)]


# ----- the function


@DTYPES
@LAYOUTS
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rows, tile", [(1, 1), (1, 4), (7, 1), (7, 3), (13, 4), (13, 6), (13, 12), (13, 13), (8, 4)])
def test_tiled_is_untiled(rows, tile, batch, layout, dtype):
    """Odd lengths, one-token tails, an upstream gradient that is not 1."""
    x = layout(randn(batch, rows, WIDTH)).requires_grad_()
    upstream = layout(randn(batch, rows, WIDTH, seed=1, scale=3.0))
    agree(tiled(mlp_function, tile), mlp_function, [x, *weights_of()], upstream, dtype)


SHIFTS = [randn(1, 1, WIDTH, seed=i).requires_grad_() for i in range(2)]
FUNCTIONS = {
    "an output that is wider": (mlp_function, inputs_of(out=9), (2, 7, 9)),
    "one number a token": (lambda *given: mlp_function(*given).square().sum(-1), inputs_of(out=9), (2, 7)),
    # defect 5, the caller's gradient is mutated: here a weight's gradient of a tile is a view of the caller's, two
    # weights' are one tensor, and one is a number expanded; adding up must touch none of them
    "gradients that alias": (
        lambda x, a, b, c: (x + a + b) * c.sum(),
        [randn(1, 5, WIDTH).requires_grad_(), *SHIFTS, randn(3, seed=3).requires_grad_()], (1, 5, WIDTH),
    ),
    "sums that alias": (lambda x, a, b: x + a + b, [randn(1, 5, WIDTH).requires_grad_(), *SHIFTS], (1, 5, WIDTH)),
    "no tokens": (mlp_function, inputs_of(rows=0), (2, 0, WIDTH)),
    # defect 5: an input that needs no gradient does not cost the weights theirs, and frozen ones get none
    **{f"no gradient of {frozen}": (
        mlp_function, [leaf(t, needs=i not in frozen) for i, t in enumerate(inputs_of())], (2, 7, WIDTH))
       for frozen in [(0,), (1,), (2, 3), (1, 2, 3), (0, 1, 3)]},
}  # fmt: skip


@pytest.mark.parametrize("tile", [1, 4, 6, 10])
@pytest.mark.parametrize("fn, inputs, shape", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions(fn, inputs, shape, tile):
    agree(tiled(fn, tile), fn, inputs, randn(*shape, seed=1))


@pytest.mark.parametrize("samples, rows", [(1, 6), (2, 3), (4, 1), (8, 1)])
def test_a_tile_holds_the_tokens_of_all_samples(samples, rows):
    seen = []
    tiled(lambda x: seen.append(x.shape[1]) or x, 6)(randn(samples, 12, WIDTH))
    assert {*seen} == {rows}


def test_backward_runs_under_the_autocast_of_forward():
    seen = []

    def fn(x, w):
        y = x @ w
        seen.append(y.dtype)
        return y

    x, w = (leaf(randn(2, 6, WIDTH, seed=i), torch.float32) for i in range(2))
    w = leaf(w[0].detach())
    with torch.autocast("cpu", torch.bfloat16):
        out = tiled(fn, 2 * 2)(x, w)
    out.float().sum().backward()
    assert seen == [torch.bfloat16] * 6
    assert (x.grad.dtype, w.grad.dtype) == (torch.float32, torch.float32)


def test_bad_tiles_and_functions():
    x = randn(2, 7, WIDTH)
    for tile in (0, -3, 2.5, True, None, "4"):
        says = "must be a whole number of tokens of at least 1"
        assert says in error_of(tiled_compute, torch.tanh, x, tile=tile)
        assert tile is None or "tile=" in error_of(TiledMLP, nn.Linear(3, 3), tile)
    for fn in (lambda t: t.mean(1), lambda t: t.transpose(0, 1), lambda t: t.sum()):
        assert "a token-wise function must keep the shape [B, S, ...]" in error_of(tiled_compute, fn, x, tile=3)


def test_default_tile_is_large_and_a_power_of_two():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert default_tile(14336, 2, cuda) == 16384  # Llama-3.1-8B: not sequence / 4096 tiles
    assert default_tile(128256, 4, cuda) == 1024
    assert default_tile(10**9, 4, cpu) == 256
    tile = default_tile(100, 4, cpu)
    assert tile & (tile - 1) == 0
    assert tile * 100 * 4 <= TILE_BYTES["cpu"] < 2 * tile * 100 * 4


@pytest.mark.parametrize("tile", [3, 7])
@pytest.mark.parametrize("read", [(0, 1), (0,), (1,)], ids=str)
def test_several_outputs(tile, read):
    """A MoE layer returns its router's scores too, [B * S, experts], and whole numbers without a gradient."""

    def whole(x, *params):
        scores = (x.flatten(0, 1) @ params[0]).softmax(-1)
        return mlp_function(x, *params), scores, scores.topk(2).indices

    def some(fn):
        return lambda *ts: torch.cat([fn(*ts)[i].flatten() for i in (*read, 2)])

    inputs, cut = inputs_of(), tiled(whole, tile)
    assert [t.shape for t in cut(*inputs)] == [t.shape for t in whole(*inputs)]
    agree(some(cut), some(whole), inputs, randn(some(cut)(*inputs).numel(), seed=1))


# ----- TiledMLP

CONFIG = {"hidden_size": WIDTH, "intermediate_size": 10, "num_attention_heads": 1}


def llama(**overrides):
    return randomised(LlamaMLP(LlamaConfig(**{**CONFIG, **overrides})), 0.5)


def gpt2(dropout=0.0):
    return randomised(GPT2MLP(10, GPT2Config(n_embd=WIDTH, n_head=2, resid_pdrop=dropout)), 0.5)


def lora(dropout=0.0):
    """LlamaMLP with adapters on two of its three projections; everything else is frozen."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=2, target_modules=["gate_proj", "down_proj"], lora_dropout=dropout)
    mlp = randomised(inject_adapter_in_model(config, llama()), 0.5)
    assert sum(p.requires_grad for p in mlp.parameters()) == 4
    return mlp


X, UPSTREAM = randn(2, 13, WIDTH).requires_grad_(), randn(2, 13, WIDTH, seed=1)


MLPS = {"llama": llama, "gpt2": gpt2, "lora": lora}


@DTYPES
@LAYOUTS
@pytest.mark.parametrize("tile", [1, 4, 12, 100, None])
@pytest.mark.parametrize("make", MLPS.values(), ids=MLPS)
def test_mlp_is_untiled(make, tile, layout, dtype):
    x, upstream = layout(randn(2, 13, WIDTH)).requires_grad_(), randn(2, 13, WIDTH, seed=1, scale=0.25)
    want = run(make(), x.contiguous(), upstream)  # GPT-2's own takes no other
    got = run(TiledMLP(make().to(dtype), tile), leaf(x, dtype), upstream.to(dtype))
    assert worst(got, want) < EXACT[dtype]


def test_zero3s_hooks_see_an_input_that_needs_a_gradient():
    """ZeRO-3 gathers a leaf's weights for backward when its input's gradient is due: there has to be one."""
    seen = []
    for frozen in (False, True):
        mlp = TiledMLP(llama().requires_grad_(not frozen), 4)
        mlp.register_forward_hook(lambda module, args, out: seen.append(args[0].requires_grad))
        mlp(randn(1, 7, WIDTH))
        with torch.no_grad():
            mlp(randn(1, 7, WIDTH))
    assert seen == [True, False, False, False]


@pytest.mark.parametrize("device", ["cpu"])
def test_dropout_inside_an_mlp_is_replayed(device):
    """GPT-2's dropout is the last thing its MLP does, so that the mask shows in the output."""
    x, upstream = leaf(X.to(device), needs=True), UPSTREAM.to(device)
    mlp = TiledMLP(gpt2(dropout=0.3).to(device), 4)
    out = mlp(x)
    assert not torch.equal(mlp(x) == 0, out == 0), "the next forward draws others"
    state = torch.get_rng_state()
    out.backward(upstream)
    assert torch.equal(state, torch.get_rng_state()), "backward must not move the caller's random numbers"
    mask = (out != 0).double() / 0.7
    assert 0 < (mask == 0).sum() < mask.numel() / 2
    whole, *want = run(gpt2().to(device), x, upstream * mask)
    assert worst([out, x.grad, *(p.grad for p in mlp.parameters())], [whole * mask, *want]) < 1e-12


@pytest.mark.gpu
def test_gpu_dropout_is_replayed():
    test_dropout_inside_an_mlp_is_replayed("cuda")


def test_bf16_weight_gradients_do_not_lose_with_the_number_of_tiles():
    """Defect 5: adding up in bf16 costs 1% at 64 tiles. The sum is kept in fp32: as good as the untiled product."""
    module, *given = llama().bfloat16(), *(randn(1, 1024, WIDTH, seed=i).bfloat16() for i in range(2))
    _, _, *exact = run(copy.deepcopy(module).double(), *(t.double() for t in given))
    (_, _, *untiled), (_, _, *ours) = (
        run(made, *given) for made in (module, TiledMLP(copy.deepcopy(module), 1024 // 64))
    )
    assert {g.dtype for g in ours} == {torch.bfloat16}
    assert worst(ours, exact) < 0.01
    for got, plain, want in zip(ours, untiled, exact):
        assert worst([got], [want]) <= 1.5 * worst([plain], [want])


def test_skip_of_an_mlp_unless_it_draws():
    """A recompute may skip the output; an MLP with dropout runs, as what is drawn after it must stay the same."""
    mlp = TiledMLP(llama(), 4)
    want = run(mlp, X, UPSTREAM)
    with entered(Pass(skip=True)):
        got = run(mlp, X, UPSTREAM)
    assert not got[0].any()
    assert got[0].untyped_storage().nbytes() == 8, "one zero stands for all"
    assert worst(got[1:], want[1:]) < 1e-12
    mlp, first = TiledMLP(gpt2(dropout=0.5), 4), Pass()
    with entered(first):
        mlp(X)
    mlp.eval()(X)  # another pass, which draws nothing
    for drew, runs in ((first.drew, True), (set(), False)):
        with entered(Pass(drew=drew, skip=True)):
            assert mlp.train(runs)(X).any() == runs


def test_memory_is_a_tile():
    """Four times the sequence at the same tile adds its input, output and two gradients, and nothing else."""
    tile, width = 64, 16
    tokens = {rows: randn(1, rows, width).float() for rows in (256, 1024)}

    def growth(tile, rows):
        mlp = llama(hidden_size=width, intermediate_size=128).float()
        module = TiledMLP(mlp, tile) if tile else mlp
        return peaks(module, leaf(tokens[rows]))[1]

    one = 4 * width * (1024 - 256)
    more = growth(tile, 1024) - growth(tile, 256)
    assert 3 * one <= more <= 3 * one + 4 * 4 * width, (more, one)  # out, its gradient, x's gradient
    assert growth(None, 1024) - growth(None, 256) > 12 * one, "the reading can tell"


def test_a_norm_in_tiles_makes_nothing_else_as_long_as_the_sequence(monkeypatch):
    """Sixteen tiles of the norm before the head, whose gradients are those of the net."""
    monkeypatch.setitem(TILE_BYTES, "cpu", 256 * 8 * 4)
    tiled, x = TiledNorm(LlamaRMSNorm(8)), torch.randn(1, 16 * 256 - 3, 8, requires_grad=True)
    assert peaks(tiled, x)[0] < 1.5 * x.nbytes


@pytest.mark.parametrize("stand_in", [TiledMLP, TiledNorm])
def test_rows_without_a_batch_are_tiled_by_rows(stand_in):
    """OPT hands its norm [B * S, E]: the width is not the sequence."""
    inner = nn.LayerNorm(12, dtype=torch.float64)
    inner = nn.Sequential(inner, nn.Linear(12, 12, dtype=torch.float64)) if stand_in is TiledMLP else inner
    x, upstream = randn(17, 12).requires_grad_(), randn(17, 12, seed=1)
    want, got = run(inner, x, upstream), run(stand_in(inner, tile=5), x, upstream)
    assert worst(got, want) < 1e-12
