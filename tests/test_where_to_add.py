"""The places that CONTRIBUTING names for additions: a toy of each kind is added there, and works."""

import re
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import ROOT, attach, check_step, make_model, plain_step, sample_of, step, text_of
from torch import nn

import alstlib
from alstlib.base import config, reference
from alstlib.hf import layer_runner
from alstlib.kernels import backends
from alstlib.linear import adapters
from alstlib.linear.adapter import Adapter
from alstlib.linear.adapters.lightning import decayed_attention
from alstlib.linear.rule import StateRule
from alstlib.offload.checkpoints import checkpoint
from alstlib.ulysses.attention import UlyssesAttention


def test_the_places_are_there():
    """What a row of the table names is in the files that it names."""
    places = text_of("CONTRIBUTING.md").partition("## Where to add")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| an? .*$", places)
    assert len(rows) == 5
    for row in rows:
        words = re.findall(r"`([\w/.-]+)`", row)
        files = [ROOT / word for word in words if "/" in word]
        text = "".join(text_of(f) for path in files for f in (path.rglob("*.py") if path.is_dir() else [path]))
        assert [word for word in words if "/" not in word and not re.search(rf"\b{word}\b", text)] == []


def test_a_kernel(monkeypatch):
    calls = []

    def forward(*args, **kwargs):
        calls.append([f.name for f in traceback.extract_stack() if Path(f.filename).is_relative_to(ROOT / "alstlib")])
        return backends.BACKENDS["eager"].forward(*args, **kwargs)

    monkeypatch.setitem(backends.BACKENDS, "toy", replace(backends.BACKENDS["eager"], name="toy", forward=forward))
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64)
    out = UlyssesAttention(alstlib.SPContext(), "toy")(q, k, v)
    assert reference.relative_error(out, reference.attention(q, k, v, scale=0.5)[0]) < 1e-12
    assert calls == [["__call__", "forward", "attention_forward"]], "more ways between a call and a kernel"


class Mixer(nn.Module):
    """Linear attention whose past decays."""

    def __init__(self, width, heads):
        super().__init__()
        self.qkv, self.heads = nn.Linear(width, 3 * width, bias=False), heads
        self.register_buffer("slopes", torch.linspace(0.1, 0.4, heads))

    def forward(self, hidden_states, **kwargs):
        return decayed_attention(*self.tokens(hidden_states), self.slopes, chunk_size=4)[0].flatten(2), None

    def tokens(self, hidden_states):
        return self.qkv(hidden_states).unflatten(2, (3, self.heads, -1)).unbind(2)


class Toy(Adapter):
    family = "toy"

    @classmethod
    def knows(cls, mixer, calls):
        return isinstance(mixer, Mixer)

    @classmethod
    def forward(cls, mixer, part):
        def kernel(*tensors, initial_state):
            return decayed_attention(*tensors, 4, initial_state)

        def decay(q, k, v, slopes):
            return (-slopes * q.shape[1]).expand(q.shape[0], -1)[..., None, None]

        def over(hidden_states, **kwargs):
            tokens = mixer.tokens(hidden_states)
            out = part("").mix(StateRule(kernel, decay), tokens, (mixer.slopes,), *tokens[1:], 4)
            return out.flatten(2), None

        return over


def with_mixer(rank, world, way):
    model = make_model()
    torch.manual_seed(3)
    model.model.layers[1].self_attn = Mixer(32, 4)
    data = sample_of(21, documents=[4, 17])
    want = plain_step(model, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "ADAPTERS", (*adapters.ADAPTERS, Toy))
        ctx = alstlib.SPContext.create(world)
        with attach(model, ctx, linear_attention=way):
            check_step(step(model, data, ctx), want)


@pytest.mark.parametrize("way", ["pass", "heads"])
def test_a_layer_with_a_state(ranks2, way):
    ranks2(with_mixer, way)


class Shelf:
    """Keeps copies on a shelf of Python's."""

    bytes_sent = bytes_fetched = 0

    def __init__(self):
        self.kept = []

    def room(self):
        return 2**40

    def ticket(self, after=None):
        return []

    def put(self, ticket, x):
        ticket.append(x.detach().clone())
        self.kept.append(x.shape)

    def get(self, ticket, device):
        return [t.to(device) for t in ticket]


def test_a_storage():
    shelf, layer, x = Shelf(), nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    (want,) = torch.autograd.grad(layer(x).square().sum(), [x])
    checkpoint(layer, x, store=shelf).square().sum().backward()
    assert reference.relative_error(x.grad, want) < 1e-6
    assert shelf.kept == [x.shape]


def test_a_way_of_running_a_layer(monkeypatch):
    ran = []

    class Watched(layer_runner.Whole):
        def run(self, x, *others):
            ran.append(self.index)
            return super().run(x, *others)

    monkeypatch.setattr(layer_runner, "Whole", Watched)
    model, data = make_model(), sample_of(17)
    want = plain_step(model, data)
    with attach(model):
        check_step(step(model, data), want)
    assert ran == [0, 1]


def test_a_row_of_the_ablation(monkeypatch):
    monkeypatch.setitem(config.ROWS, "toy", {"options": {"tiles": {"mlp": True}}})
    row = config.row_config("toy").options
    assert (row.tile("mlp"), row.tile("loss"), row.offload) == (True, False, False)
