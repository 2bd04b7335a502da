"""MLP outputs that a recompute skips: what is found unread is, and a norm's work done in the MLP's tiles is exact."""

import copy

import pytest
import torch
import zoo
from cases import attach, batch, freeze, lines_of, make_model, mlp_tokens, plain_step, step, worst_error
from torch import nn
from torch.nn import functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer

LENGTH = 20


class Layer(Gemma2DecoderLayer):
    """Gemma's layer, with its last lines open: `finish` is what it does with the MLP's output m."""

    def forward(self, hidden_states, **kwargs):
        out, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        x = hidden_states + self.post_attention_layernorm(out)
        return x + self.finish(self.mlp(self.pre_feedforward_layernorm(x)))


class Dropout(nn.Module):
    """Draws feature by feature: tiles would draw in another order."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return F.dropout(x.transpose(1, 2).contiguous(), self.p).transpose(1, 2) if self.p else x * 1.0


FINISHES = """
nothing                 | 2 | m
scaled and reshaped     | 2 | (0.22 * m).flatten(0, 1).unflatten(0, m.shape[:2])
learned scale           | 3 | s.post_feedforward_layernorm.weight * m
squared                 | 3 | m**2
gated                   | 3 | torch.sigmoid(m) * m
a projection            | 3 | m @ s.self_attn.o_proj.weight
the MLP again           | 6 | s.mlp(m)
norm                    | 2 | s.post_feedforward_layernorm(m)
norm, used twice        | 2 | (n := s.post_feedforward_layernorm(m)) + n.transpose(1, 2).transpose(1, 2)
norm and itself         | 3 | s.post_feedforward_layernorm(m) + m
itself and norm         | 3 | 1.0 * m + s.post_feedforward_layernorm(m)
norm twice              | 3 | s.post_feedforward_layernorm(m) + s.post_feedforward_layernorm(m)
norm of a norm          | 3 | s.post_feedforward_layernorm(s.post_feedforward_layernorm(m))
norm read               | 3 | s.post_feedforward_layernorm(m).tanh()
norm of twice           | 3 | s.post_feedforward_layernorm(2 * m)
with a buffer           | 3 | s.stateful(m)
dropout                 | 2 | s.dropout(m)
dropout, then norm      | 3 | s.post_feedforward_layernorm(s.dropout(m))
"""
"""What a layer s does with its MLP's output m, and how often the MLP runs then: six times where it is called again,
three times each; the backward of a dropout reads its mask, not its input."""
FINISHES = {name: (eval(f"lambda s, m: {does}"), int(forwards)) for name, forwards, does in lines_of(FINISHES, "|")}


def open_model(finish, p=0.0):
    model = make_model("gemma2")
    for layer in model.model.layers:
        layer.__class__ = type("Open", (Layer,), {"finish": finish})
        layer.stateful, layer.dropout = nn.LayerNorm(32, elementwise_affine=False), Dropout(p)
        layer.stateful.register_buffer("calls", torch.zeros(()))
    return model


def steps(model, options, count=2):
    """Gradients of each step, and the MLP's forwards for each layer in the last one."""
    tokens, grads = mlp_tokens(model), []
    with attach(model, **options):
        for _ in range(count):
            tokens[:] = [0] * len(tokens)
            grads.append(step(model, batch(), seed=7)[1])
    return grads, sum(tokens) / LENGTH / len(tokens)


PLAIN = {"tiles": {"loss": True, "norm": True}, "checkpoint": False}


def exact(model, want=None, **options):
    """The step that learns the layer and the next have plain transformers' gradients; forwards of the MLP."""
    want = want or plain_step(model, batch())[1]
    grads, forwards = steps(model, {"tiles": {"mlp": 7, "loss": True, "norm": True}, **options})
    assert all(worst_error(got, want)[0] < 1e-5 for got in grads)
    return forwards


@pytest.mark.parametrize("kind", FINISHES)
def test_what_follows_the_mlp(kind):
    """The MLP runs twice where one norm alone reads it."""
    finish, forwards = FINISHES[kind]
    assert exact(open_model(finish), save_attention=True) == forwards


@pytest.mark.parametrize("kind", ["dropout", "dropout, then norm"])
def test_what_draws_is_replayed(kind):
    """A dropout between MLP and residual draws in the recompute what it drew in forward."""
    model = open_model(FINISHES[kind][0], p=0.3)
    exact(model, steps(copy.deepcopy(model), PLAIN, 1)[0][0])


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_of_the_user_on_the_norm(register):
    """A forward hook that changes the norm's output, or its input, still counts."""
    model = make_model("gemma2")

    def scale(module, args, out=None):
        return (args[0] * 3.0,) if out is None else out * 3.0

    for layer in model.model.layers:
        getattr(layer.post_feedforward_layernorm, register)(scale)
    exact(model, save_attention=True)


@pytest.mark.parametrize("frozen", ["post_feedforward_layernorm", "mlp"])
def test_frozen_norms_and_frozen_mlps(frozen):
    model = make_model("gemma2")
    freeze(model, [frozen])
    assert exact(model, save_attention=True) == 2


@pytest.mark.parametrize("name", ["Gemma2Config", "Gemma3TextConfig", "Olmo2Config", "Olmo3Config", "Glm4Config"])
def test_models_that_normalise_the_mlps_output(monkeypatch, name):
    """Twice, not three times, in the models of Hugging Face that put a norm between MLP and residual."""
    fields = {"head_dim": 8, "sliding_window": 64, "attn_logit_softcapping": None}
    monkeypatch.setitem(zoo.MORE, name, (name, fields))
    assert exact(zoo.build(name), save_attention=True, tiles={"mlp": True, "loss": 7, "norm": True}, offload=True) == 2
