"""The backward pass of the fake GPU."""

import torch
from fake import python_engine


def test_the_backward_pass_in_python_is_pytorchs():
    torch.manual_seed(0)
    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 5, requires_grad=True)

    def loss():
        h = torch.nn.functional.silu(x @ w)
        return (h * h[:, :1]).sum() + (x * 2).sum()

    want = torch.autograd.grad(loss(), [x, w])
    with python_engine():
        loss().backward()
        chosen = torch.autograd.grad(loss(), [w])
    for got, expected in zip((x.grad, w.grad, *chosen), (*want, want[1])):
        torch.testing.assert_close(got, expected)
