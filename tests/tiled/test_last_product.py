"""A tile that runs for its gradients alone leaves its last product out, and its gradients are right."""

import pytest
import torch
from cases import lines_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from alstlib.base.reference import relative_error
from alstlib.tiled.compute import TiledMLP

WIDTH, INNER, TOKENS = 6, 10, 7


class Gated(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias)
        self.after = lambda y: y

    def forward(self, x):
        return self.after(self.down(nn.functional.silu(self.gate(x)) * self.up(x)))


class Products(TorchDispatchMode):
    """Counts the products of all tokens with one weight."""

    def __init__(self, tokens):
        super().__init__()
        self.one, self.multiplied = tokens * WIDTH * INNER, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = args[-2:]
            self.multiplied += left.numel() * right.shape[1]
        return func(*args, **(kwargs or {}))

    @property
    def made(self):
        return self.multiplied / self.one


def products_of_backward(mlp, tile=4):
    """Products of a backward through the MLP's tiles, whose gradients are those of the MLP itself."""
    torch.manual_seed(0)
    x, upstream = torch.randn(2, TOKENS, WIDTH, requires_grad=True), torch.randn(2, TOKENS, WIDTH)
    wanted = [x, *(p for p in mlp.parameters() if p.requires_grad)]
    torch.manual_seed(1)
    right = torch.autograd.grad(mlp(x), wanted, upstream)
    torch.manual_seed(1)
    out = TiledMLP(mlp, tile)(x)
    with Products(2 * TOKENS) as counter:
        got = torch.autograd.grad(out, wanted, upstream)
    for g, w in zip(got, right):
        assert relative_error(g, w) < 1e-5
    return counter.made


def check_gradients(got, want, of):
    """Of the sums of two outputs."""
    assert relative_error(*(torch.autograd.grad(out.sum(), of)[0] for out in (got, want))) < 1e-5


@pytest.mark.parametrize("bias", [False, True])
def test_left_out(bias):
    assert products_of_backward(Gated(bias)) == 2 + 6


def test_frozen_weights_get_no_gradient():
    mlp = Gated(bias=True)
    mlp.down.requires_grad_(False)
    assert products_of_backward(mlp) == 2 + 5


CHANGES = """
read                   | mlp.after = lambda y: y.clamp(-0.1, 0.1)
read where it is large | mlp.after = lambda y: y.clamp(-0.1, 0.1) if y.abs().max() > 0.5 else y
read beside            | mlp.after = lambda y: (y.abs().max(), y)[1]
read in place          | mlp.register_forward_hook(lambda m, args, out: out.clamp_(-0.1, 0.1))
watched                | mlp.down.register_forward_hook(lambda m, args, out: None)
watched whole          | mlp.register_forward_hook(lambda m, args, out: None)
watched in backward    | mlp.register_full_backward_hook(lambda m, grads, of: None)
compiled               | mlp.compile(backend="eager")
patched                | mlp.down.forward = mlp.down.forward
"""
"""What a user does to an MLP; where it is large, as for fp16, the first tile is clamped and the others are not."""


@pytest.mark.parametrize("what, change", lines_of(CHANGES, "|"))
def test_computed_where_something_reads_it(what, change):
    mlp = Gated()
    exec(change, {"mlp": mlp})
    assert products_of_backward(mlp) == 3 + 6


def test_a_product_that_runs_twice_is_computed():
    mlp = Gated()
    mlp.after = lambda y: mlp.down(nn.functional.pad(y, (0, INNER - WIDTH)))
    assert products_of_backward(mlp) == 4 + 8


def test_computed_under_autocast():
    mlp, x = Gated(), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = TiledMLP(mlp, 4)(x)
    with Products(TOKENS) as counter:
        out.float().sum().backward()
    assert counter.made == 3 + 6


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
    assert relative_error(out, mlp(x)) < 1e-6
    check_gradients(out, mlp(x), vector)


def test_computed_while_a_hook_watches_all_modules():
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: None)
    try:
        assert products_of_backward(Gated()) == 3 + 6
    finally:
        handle.remove()


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
        found.append(vector.grad)
    assert relative_error(*found) < 1e-5


def test_left_out_again_once_nobody_watches():
    mlp = Gated()
    tiled, x = TiledMLP(mlp, 4), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    made = []
    for _ in range(2):
        handle = mlp.gate.register_forward_hook(lambda m, args, out: None)
        for remove in (lambda: None, handle.remove):
            remove()
            out = tiled(x)
            with Products(TOKENS) as counter:
                out.sum().backward()
            made.append(counter.made)
    assert made == [9, 8, 9, 8]
