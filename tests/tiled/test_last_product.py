"""A tile that runs for its gradients alone leaves its last product out, and its gradients are right."""

import pytest
import torch
from cases import lines_of
from operators import Operations, worst
from torch import nn

from alstlib.tiled.compute import TiledMLP

WIDTH, INNER, TOKENS = 6, 10, 7
ONE = TOKENS * WIDTH * INNER
"""Multiplications of the product of all tokens with one weight."""


class Gated(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias)
        self.after = lambda y: y

    def forward(self, x):
        return self.after(self.down(nn.functional.silu(self.gate(x)) * self.up(x)))


def products_of_backward(mlp, tile=4):
    """Products of a backward through the MLP's tiles, whose gradients are those of the MLP itself."""
    torch.manual_seed(0)
    x, upstream = torch.randn(2, TOKENS, WIDTH, requires_grad=True), torch.randn(2, TOKENS, WIDTH)
    wanted = [x, *(p for p in mlp.parameters() if p.requires_grad)]
    torch.manual_seed(1)
    right = torch.autograd.grad(mlp(x), wanted, upstream)
    torch.manual_seed(1)
    out = TiledMLP(mlp, len(x) * tile)(x)
    with Operations() as operations:
        got = torch.autograd.grad(out, wanted, upstream)
    assert worst(got, right) < 1e-5
    return operations.multiplications / (2 * ONE)


def check_gradients(got, want, of):
    """Of the sums of two outputs."""
    assert worst(*([torch.autograd.grad(out.sum(), of)[0]] for out in (got, want))) < 1e-5


CHANGES = """
left out               | 2 + 6 | pass
left out, with biases  | 2 + 6 | mlp = Gated(bias=True)
left out, frozen       | 2 + 5 | mlp = Gated(bias=True); mlp.down.requires_grad_(False)
read                   | 3 + 6 | mlp.after = lambda y: y.clamp(-0.1, 0.1)
read where it is large | 3 + 6 | mlp.after = lambda y: y.clamp(-0.1, 0.1) if y.abs().max() > 0.5 else y
read beside            | 3 + 6 | mlp.after = lambda y: (y.abs().max(), y)[1]
read in place          | 3 + 6 | mlp.register_forward_hook(lambda m, args, out: out.clamp_(-0.1, 0.1))
watched                | 3 + 6 | mlp.down.register_forward_hook(lambda m, args, out: None)
watched whole          | 3 + 6 | mlp.register_forward_hook(lambda m, args, out: None)
watched in backward    | 3 + 6 | mlp.register_full_backward_hook(lambda m, grads, of: None)
compiled               | 3 + 6 | mlp.compile(backend="eager")
patched                | 3 + 6 | mlp.down.forward = mlp.down.forward
runs twice             | 4 + 8 | mlp.after = lambda y: mlp.down(nn.functional.pad(y, (0, INNER - WIDTH)))
"""
"""The products of forward and of gradients in a backward of an MLP, and what a user does to it; where it is large, as
for fp16, the first tile is clamped and the others are not."""


@pytest.mark.parametrize("what, products, change", lines_of(CHANGES, "|"))
def test_computed_where_something_reads_it(what, products, change):
    names = {**globals(), "mlp": Gated()}
    exec(change, names)
    assert products_of_backward(names["mlp"]) == eval(products)


def test_computed_under_autocast():
    mlp, x = Gated(), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = TiledMLP(mlp, 4)(x)
    with Operations() as operations:
        out.float().sum().backward()
    assert operations.multiplications == (3 + 6) * ONE


def test_what_one_mode_shows_does_not_hold_in_the_other():
    """In evaluation dropout gives back its input: there the product makes the output, and in training it does not."""
    dropout = nn.Dropout(0.5)
    mlp = Gated()
    mlp.after = lambda y: dropout(y) if not mlp.training else dropout(y).square()
    tiled, x = TiledMLP(mlp, TOKENS), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    mlp.eval(), dropout.eval()
    with torch.no_grad():
        tiled(x)
    mlp.train()
    check_gradients(tiled(x), mlp(x), x)


def test_an_output_that_changes_between_the_passes_is_computed():
    dropout = nn.Dropout(0.5)
    mlp = Gated()
    mlp.up = nn.Sequential(mlp.up, dropout)
    tiled, x = TiledMLP(mlp, TOKENS), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    torch.manual_seed(1)
    out = tiled(x)
    mlp.after = torch.square
    torch.manual_seed(1)
    check_gradients(out, mlp(x), x)


def test_a_first_pass_with_a_graph_computes_all():
    """The weights are frozen, and what trains is a vector that the MLP adds and does not own."""
    vector = torch.zeros(WIDTH, requires_grad=True)

    class Steered(Gated):
        def forward(self, x):
            return super().forward(x + vector)

    mlp, x = Steered().requires_grad_(False), torch.randn(1, TOKENS, WIDTH)
    tiled = TiledMLP(mlp, 4)
    with torch.no_grad():
        tiled(x)
    out = tiled(x)
    assert worst([out], [mlp(x)]) < 1e-6
    check_gradients(out, mlp(x), vector)


def test_computed_while_a_hook_watches_all_modules():
    with nn.modules.module.register_module_forward_hook(lambda m, args, out: None):
        assert products_of_backward(Gated()) == 3 + 6


def test_an_mlp_that_opens_autocast_itself():
    class Mixed(Gated):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.down(input=nn.functional.silu(self.gate(x)) * self.up(x))

    assert products_of_backward(Mixed(), TOKENS) == 3 + 6


def test_what_a_stray_became_outside_serves_all_tiles():
    """Two tiles share the graph between a vector and what an MLP adds of it."""
    vector, mlp = torch.randn(WIDTH, requires_grad=True), Gated()
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    found = []
    for run in (mlp, TiledMLP(mlp, 4)):
        vector.grad, added = None, (2 * vector).sigmoid()
        mlp.after = lambda y, added=added: y + added
        run(x).square().sum().backward()
        found.append([vector.grad])
    assert worst(*found) < 1e-5


def test_left_out_again_once_nobody_watches():
    mlp = Gated()
    tiled, x = TiledMLP(mlp, 4), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    made = []
    for _ in range(2):
        handle = mlp.gate.register_forward_hook(lambda m, args, out: None)
        for remove in (lambda: None, handle.remove):
            remove()
            out = tiled(x)
            with Operations() as operations:
                out.sum().backward()
            made.append(operations.multiplications / ONE)
    assert made == [9, 8, 9, 8]
