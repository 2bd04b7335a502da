"""Where operations run: forward, recompute and backward of modules, told apart without holding a tensor."""

import torch
import yaml
from torch import nn

from alstlib.planner.measure.scope import ROOT, Places, category
from alstlib.planner.measure.simulate import Recording

CATEGORIES = yaml.safe_load("""
model.layers.3.self_attn.q_proj: attention
model.layers.3.mlp: mlp
model.layers.3.post_attention_layernorm: hidden states
model.layers.3: hidden states
lm_head: loss
model.norm: loss
model.embed_tokens: hidden states
model.rotary_emb: hidden states
transformer.h.0.attn: attention
model.layers.3.self_attn<exchange>: exchange
""")


def test_categories_of_paths():
    assert {path: category(f"{ROOT}.{path}") for path in CATEGORIES} == CATEGORIES


WIDE = 100 * 512 * 4
"""Bytes of what lies between the layers of `Twice`."""


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 512, bias=False), nn.Linear(512, 8, bias=False)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def peak_of(ledger):
    """Where the most was alive, and what then was, by place."""
    moment, (_, places) = max(ledger._cpu.moments.items(), key=lambda found: found[1][0])
    return moment.partition("|")[0], places


def test_a_backward_belongs_to_the_module_of_its_forward():
    model, x = Twice(), torch.randn(100, 8)
    with Places(model) as places, Recording(place=places.now) as ledger:
        loss = model(x).square().sum()
        place, made = peak_of(ledger)
        assert made[f"{ROOT}.a"] == WIDE
        assert place == ROOT  # the relu is the model's own
        loss.backward()
    place, made = peak_of(ledger)
    assert place == ROOT  # the relu's backward
    assert made[f"{ROOT}.b"] >= WIDE  # the gradient of b's wide input
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_a_recompute_within_a_backward_is_known_too():
    from torch.utils.checkpoint import checkpoint

    model, x = Twice(), torch.randn(100, 8, requires_grad=True)
    with Places(model) as places, Recording(place=places.now) as ledger:
        out = checkpoint(model, x, use_reentrant=True).square().sum()
        before = ledger.device_bytes
        ledger.start()
        out.backward()
    _, made = peak_of(ledger)
    assert made[ROOT] >= 2 * WIDE  # the relu's output, recomputed, and its gradient
    assert made[f"{ROOT}.b"] >= WIDE
    assert ledger.device_peak - before <= sum(nbytes for place, nbytes in made.items() if place)
