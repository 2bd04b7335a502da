"""MLP outputs that a recompute skips: what is found unread is, and a norm's work done in the MLP's tiles is exact."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from cases import VOCAB, make_model, plain_run, worst_error
from operators import leaf, randn
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, LlamaConfig, PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

import alstlib
from alstlib.reference import shift
from alstlib.tiled.compute import Pass, TiledMLP, TiledNorm, entered
from alstlib.tiled.skip import output_unread

WIDTH, LENGTH = 6, 20


def llama() -> LlamaMLP:
    torch.manual_seed(0)
    return LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=10, num_attention_heads=1)).double()


def gpt2(dropout: float) -> GPT2MLP:
    torch.manual_seed(0)
    return GPT2MLP(10, GPT2Config(n_embd=WIDTH, n_head=2, resid_pdrop=dropout)).double()


# ----- which layers read their MLP's output


def layer_graph(kind: str) -> Tensor:
    """The output of a layer of this kind on an input that needs a gradient; the MLP is tiled, its output skipped."""
    mlps = [TiledMLP(llama(), 4), TiledMLP(gpt2(0.2 if kind == "dropout in the MLP" else 0.0), 4)]
    norm, gain = nn.LayerNorm(WIDTH, dtype=torch.float64), leaf(randn(WIDTH, seed=3))
    x = leaf(randn(1, 7, WIDTH))
    layers: dict[str, Callable[[], Tensor]] = {
        "pre-norm": lambda: x + mlps[0](norm(x)),
        "pre-norm, dropout in the MLP": lambda: x + mlps[1](norm(x)),
        "dropout after it": lambda: x + F.dropout(mlps[0](norm(x)), 0.2),
        "scaled residual": lambda: x + 0.22 * mlps[0](norm(x)),
        "reshaped": lambda: x + mlps[0](norm(x).view(1, 7, WIDTH)).view(7, WIDTH).view(1, 7, WIDTH),
        "parallel": lambda: x + mlps[0](norm(x)) + torch.tanh(x),
        "another MLP beside it": lambda: x + mlps[0](norm(x)) + mlps[1](norm(x)),
        "no MLP": lambda: x * 2,
        "a tiled norm before it": lambda: x + mlps[0](TiledNorm(norm)(x)),
        "a tiled norm after it": lambda: x + TiledNorm(norm)(mlps[0](norm(x))),
        "post-norm": lambda: norm(x + mlps[0](x)),
        "sandwich norm": lambda: x + norm(mlps[0](norm(x))),
        "learned scale": lambda: x + gain * mlps[0](norm(x)),
        "gated output": lambda: x + torch.sigmoid(x) * mlps[0](norm(x)),
        "squared": lambda: x + mlps[0](norm(x)) ** 2,
        "another MLP after it": lambda: two_after_another(x, mlps, norm),
        "a projection after it": lambda: x + F.linear(mlps[0](norm(x)), leaf(randn(WIDTH, WIDTH))),
    }
    with entered(Pass(skip=True)):
        return layers[kind]()


def two_after_another(x: Tensor, mlps: list[TiledMLP], norm: nn.Module) -> Tensor:
    x = x + mlps[0](norm(x))
    return x + mlps[1](norm(x))


@pytest.mark.parametrize(
    ("kind", "unread"),
    [
        ("pre-norm", True), ("pre-norm, dropout in the MLP", True), ("dropout after it", True),
        ("scaled residual", True), ("reshaped", True), ("parallel", True), ("another MLP beside it", True),
        ("no MLP", True), ("a tiled norm before it", True), ("a tiled norm after it", False),
        ("post-norm", False), ("sandwich norm", False), ("learned scale", False), ("gated output", False),
        ("squared", False), ("another MLP after it", False), ("a projection after it", False),
    ],
)  # fmt: skip
def test_output_unread(kind: str, unread: bool) -> None:
    assert output_unread(layer_graph(kind)) is unread


def test_output_unread_of_a_constant() -> None:
    assert output_unread(randn(1, 2, WIDTH))


# ----- a norm's work in the MLP's tiles


class Layer(Gemma2DecoderLayer):
    """Gemma's layer, with its last lines open: `finish` is what it does with the MLP's output m."""

    finish: Callable[[Any, Tensor], Tensor]

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        out, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        x = hidden_states + self.post_attention_layernorm(out)
        return x + self.finish(self.mlp(self.pre_feedforward_layernorm(x)))


class Stateful(nn.Module):
    """Counts its calls in a buffer and lets the count matter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])


class OverTokens(nn.Module):
    """Normalises over the sequence: not token by token."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(1, keepdim=True).sqrt()


class Dropout(nn.Module):
    """Draws feature by feature: tiles would draw in another order."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x.transpose(1, 2).contiguous(), self.p).transpose(1, 2) if self.p else x * 1.0


# what a layer does with its MLP's output, and how often the MLP runs then
FINISHES: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "norm": (lambda s, m: s.post_feedforward_layernorm(m), 2),
    "half of the norm": (lambda s, m: 0.5 * s.post_feedforward_layernorm(m), 2),
    "norm, used twice": (lambda s, m: (n := s.post_feedforward_layernorm(m)) + n.transpose(1, 2).transpose(1, 2), 2),
    "norm and itself": (lambda s, m: s.post_feedforward_layernorm(m) + m, 3),
    "itself and norm": (lambda s, m: 1.0 * m + s.post_feedforward_layernorm(m), 3),
    "norm twice": (lambda s, m: s.post_feedforward_layernorm(m) + s.post_feedforward_layernorm(m), 3),
    "norm of a norm": (lambda s, m: s.post_feedforward_layernorm(s.post_feedforward_layernorm(m)), 3),
    "norm read": (lambda s, m: s.post_feedforward_layernorm(m).tanh(), 3),
    "norm of twice": (lambda s, m: s.post_feedforward_layernorm(2 * m), 3),
    "norm and its input read": (lambda s, m: s.post_feedforward_layernorm(m) * m, 3),
    "with a buffer": (lambda s, m: s.stateful(m), 3),
    "over the tokens": (lambda s, m: s.over_tokens(m), 3),
    "with children": (lambda s, m: s.wrapped(m), 3),
    "dropout": (lambda s, m: s.dropout(m), 2),  # its backward reads its mask, not its input
    "dropout, then norm": (lambda s, m: s.post_feedforward_layernorm(s.dropout(m)), 3),
    "two norms": (lambda s, m: s.post_feedforward_layernorm(m) + s.post_attention_layernorm(m), 3),
}


def batch(length: int = LENGTH, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "position_ids": torch.arange(length)[None], "shift_labels": shift(ids)}


def open_model(finish: Callable[[Any, Tensor], Tensor], p: float = 0.0) -> PreTrainedModel:
    model = make_model("gemma2")
    for layer in model.model.layers:
        layer.__class__ = type("Open", (Layer,), {"finish": finish})
        layer.stateful, layer.over_tokens = Stateful(), OverTokens()
        layer.wrapped, layer.dropout = nn.Sequential(copy.deepcopy(layer.post_feedforward_layernorm)), Dropout(p)
    return model


def steps(model: PreTrainedModel, options: dict[str, Any], count: int = 2) -> tuple[list[dict[str, Tensor]], float]:
    """Gradients of each step, and the MLP's forwards for each layer in the last one."""
    tokens = Counter[str]()
    grads = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, out: tokens.update({"mlp": out.shape[1]}))
    with alstlib.apply(model, None, alstlib.Options(**options)):
        for _ in range(count):
            model.zero_grad()
            tokens.clear()
            torch.manual_seed(7)
            alstlib.causal_lm_loss(model, batch()).loss.backward()
            grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return grads, tokens["mlp"] / LENGTH / len(model.model.layers)


@pytest.mark.parametrize("kind", FINISHES)
def test_what_follows_the_mlp(kind: str) -> None:
    """Exact in the step that learns the layer and in the next; the MLP runs twice where one norm alone reads it."""
    finish, forwards = FINISHES[kind]
    model = open_model(finish)
    ids = batch()["input_ids"]
    _, want = plain_run(model, [{"input_ids": ids, "labels": ids}])
    grads, counted = steps(model, {"tiled_mlp": 7, "save_attention": True})
    for got in grads:
        assert worst_error(got, want)[0] < 1e-5
    assert counted == forwards


@pytest.mark.parametrize("kind", ["dropout", "dropout, then norm"])
def test_what_draws_is_replayed(kind: str) -> None:
    """A dropout between MLP and residual draws in the recompute what it drew in forward."""
    finish, _ = FINISHES[kind]
    model = open_model(finish, p=0.3)
    plain, _ = steps(copy.deepcopy(model), {"tiled_mlp": False, "checkpoint": False}, 1)
    grads, _ = steps(model, {"tiled_mlp": 7})
    for got in grads:
        assert worst_error(got, plain[0])[0] < 1e-5


def test_a_dropout_that_is_turned_on_later() -> None:
    """Learned while it drew nothing, exact when it draws."""
    model = open_model(FINISHES["dropout"][0])
    with alstlib.apply(model, None, alstlib.Options(tiled_mlp=7)):
        grads = []
        for p in (0.0, 0.3):
            for layer in model.model.layers:
                layer.dropout.p = p
            model.zero_grad()
            torch.manual_seed(7)
            alstlib.causal_lm_loss(model, batch()).loss.backward()
            grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    plain, _ = steps(model, {"tiled_mlp": False, "checkpoint": False}, 1)
    assert worst_error(grads[1], plain[0])[0] < 1e-5
    assert worst_error(grads[0], plain[0])[0] > 1e-2


def test_a_hook_of_the_user_on_the_norm() -> None:
    """A forward hook that changes the norm's output, or its input, still counts."""
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        model = make_model("gemma2")

        def scale(module: nn.Module, args: tuple[Tensor, ...], out: Tensor | None = None) -> Any:
            return (args[0] * 3.0,) if out is None else out * 3.0

        for layer in model.model.layers:
            getattr(layer.post_feedforward_layernorm, register)(scale)
        ids = batch()["input_ids"]
        _, want = plain_run(model, [{"input_ids": ids, "labels": ids}])
        for got in steps(model, {"tiled_mlp": 7, "save_attention": True})[0]:
            assert worst_error(got, want)[0] < 1e-5


def test_frozen_norms_and_frozen_mlps() -> None:
    for frozen in ("post_feedforward_layernorm", "mlp"):
        model = make_model("gemma2")
        for name, p in model.named_parameters():
            p.requires_grad_(frozen not in name)
        ids = batch()["input_ids"]
        _, want = plain_run(model, [{"input_ids": ids, "labels": ids}])
        grads, forwards = steps(model, {"tiled_mlp": 7, "save_attention": True})
        assert forwards == 2
        assert all(worst_error(got, want)[0] < 1e-5 for got in grads)


def test_a_layer_is_learned_on_more_than_one_token() -> None:
    """One token says nothing about what a module does across tokens."""
    model = open_model(FINISHES["over the tokens"][0])
    ids = batch()["input_ids"]
    _, want = plain_run(model, [{"input_ids": ids, "labels": ids}])
    with alstlib.apply(model, None, alstlib.Options(tiled_mlp=7)):
        alstlib.causal_lm_loss(model, {**batch(1), "shift_labels": ids[:, :1]}).loss.backward()
        model.zero_grad()
        alstlib.causal_lm_loss(model, batch()).loss.backward()
    assert worst_error({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, want)[0] < 1e-5


MODELS = ["Gemma2Config", "Gemma3TextConfig", "Olmo2Config", "Olmo3Config", "Glm4Config"]


@pytest.mark.parametrize("name", MODELS)
def test_models_that_normalise_the_mlps_output(name: str) -> None:
    """Twice, not three times, in the models of Hugging Face that put a norm between MLP and residual."""
    torch.manual_seed(0)
    config = getattr(transformers, name)(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, head_dim=8, sliding_window=64, bos_token_id=0,
        eos_token_id=1, pad_token_id=2, attn_logit_softcapping=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    ids = batch()["input_ids"]
    _, want = plain_run(model, [{"input_ids": ids, "labels": ids}])
    grads, forwards = steps(model, {"tiled_mlp": 7, "tiled_loss": 7, "offload": "async", "save_attention": True})
    for got in grads:
        assert worst_error(got, want)[0] < 1e-5
    assert forwards == 2
