"""A core attention of the user's own: exact as a whole, in pieces and on two ranks, and refused where it is wrong."""

import matrix
import pytest
import torch
import zoo
from cases import attach, check_refused, lines_of, make_model

import alstlib
from alstlib.base import reference
from alstlib.kernels.backends import of_user
from alstlib.kernels.rule import Attended
from alstlib.kernels.user_attention import differentiated


def plain(q, k, v, *, scale, causal):
    """A user's attention in plain PyTorch, which autograd differentiates."""
    return reference.attention(q, k, v, scale=scale, causal=causal)


class WithBackward:
    """The same with a backward of its own; its logsumexp has no gradient, as that of flash-attn's functions."""

    def __call__(self, q, k, v, *, scale, causal):
        out, lse = plain(q, k, v, scale=scale, causal=causal)
        return out, lse.detach()

    def backward(self, *given, scale, causal):
        """Of dout, q, k, v, out and the logsumexp."""
        dout, *kept = given
        return differentiated(reference.attention, dout, Attended(*kept), scale=scale, causal=causal)


WHOLE = {"save_attention": True}
CHUNKS = {"offload": "sync", "chunk": 5, "on_host": "hidden+kv"}


@pytest.mark.parametrize("how", [WHOLE, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("own", [plain, WithBackward()], ids=["autograd", "own backward"])
@pytest.mark.parametrize(
    "name, ranks",
    [(name, "1x1") for name in ("llama", "qwen2", "deepseek_v3", "gpt_oss")]
    + [(name, "2x1") for name in ("llama", "llama, 9 heads on 3")],
)
def test_a_users_attention_is_composed_as_a_kernel(pools, name, ranks, own, how):
    """Grouped heads, documents, windows, sinks, values of another width; on a rank, and on two."""
    case = matrix.Case(name, ranks, "packed")
    matrix.check_on(pools, case, (1e-12, 1e-12), options={"attention": own, **how})


def test_kernels_in_sixteen_bits_pass_the_check():
    x = torch.randn(1, 4, 9, 8, dtype=torch.bfloat16)

    def rounded(q, k, v, **how):
        out, lse = plain(q.float(), k.float(), v.float(), **how)
        return out.to(q.dtype), lse

    out, lse = of_user(rounded).forward(x, x[:, :2], x[:, :2], scale=0.3, causal=True)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32


WRONG = r"""
to the base 2        | its logsumexp differs | (plain(*a, **kw)[0], plain(*a, **kw)[1] / 0.6931)
scale left out       | its output differs    | plain(*a, **{**kw, "scale": 1.0})
not causal           | its output differs    | plain(*a, **{**kw, "causal": False})
no gradient          | a logsumexp that autograd cannot differentiate | WithBackward()(*a, **kw)
no logsumexp         | \] torch\.float32; output .* and logsumexp .* are needed | plain(*a, **kw)[0]
another layout       | are needed            | (plain(*a, **kw)[0].transpose(1, 2), plain(*a, **kw)[1])
logsumexp in 16 bits | \] torch\.float16;    | (plain(*a, **kw)[0], plain(*a, **kw)[1].half())
a zero gradient      | its dq differs        | [(o, lse.detach() + 0 * o.sum(-1)) for o, lse in [plain(*a, **kw)]][0]
"""
"""What a function gives of its arguments, and what is said of it. Only a call on a part of the keys can show that a
logsumexp's gradient is always zero."""
WRONG = {name: (eval(f"lambda *a, **kw: {gives}"), why) for name, why, gives in lines_of(WRONG, "|")}


@pytest.mark.parametrize("own, why", WRONG.values(), ids=WRONG)
def test_a_wrong_function_is_refused_at_its_first_call(own, why):
    model, ids = make_model(), torch.zeros(1, 8, dtype=torch.long)
    with attach(model, attention=own):
        for _ in range(2):
            check_refused(why, model, ids)


def test_what_cannot_be_an_attention():
    for own, says in (
        (5, r"attention=5 must be one of 'auto', .*'eager', or a function \(q, k, v"),
        (WithBackward, "attention=WithBackward is a class; give a function, or an instance"),
    ):
        check_refused(says, alstlib.Options, attention=own)
    check_refused("attention='plain' does not compute a soft cap", attach, zoo.build("gemma2"), attention=plain)
