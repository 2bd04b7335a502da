"""Every kernel for CUDA is called as it wants to be called, in one piece and in chunks, whatever the attention."""

import pytest
import torch
import yaml
from cases import lines_of
from fake import KERNELS as COUNTED
from fake import fake_cuda
from operators import attend, exchanged

from alstlib.kernels.attention import attention_backward, attention_forward
from alstlib.kernels.backends import BACKENDS, choose_backend
from alstlib.kernels.rule import Attended, Rule
from alstlib.planner.measure.simulate import fake_ranks
from alstlib.ulysses.alltoall import Exchange
from alstlib.ulysses.head_layouts import SplitHeads, layout_of
from alstlib.ulysses.head_split import Sample

CUDA, LENGTH = torch.device("cuda:0"), 1024
KERNELS = ["cudnn", "flash", "efficient", "blockwise", "eager"]
FORMS = yaml.safe_load("""
whole: {}
documents: {documents: [0, 1, 5, 300, 812, 813, 1024]}
a window: {window: 300}
a window of one: {window: 1}
documents and a window: {documents: [0, 3, 515, 1024], window: 300}
a soft cap: {softcap: 30.0}
sinks: {sinks: true}
values that are narrower: {value_width: 64}
values that are wider: {value_width: 128, width: 64, documents: [0, 300, 1024]}
latent attention: {width: 192, value_width: 128}
latent attention, documents: {width: 192, value_width: 128, documents: [0, 300, 1024]}
a width of 160: {width: 160}
a width of 256: {width: 256}
a width of 36: {width: 36}
a width of 36, documents: {width: 36, documents: [0, 300, 1024]}
an odd length: {length: 999}
one token: {length: 1}
batch 2: {batch: 2, documents: [0, 700, 1024, 1027, 2048]}
""")


@pytest.fixture
def watch():
    with fake_cuda() as watch:
        yield watch


def tensors(buffer, batch=1, heads=8, kv=2, length=LENGTH, width=128, value_width=None):
    """q, k, v, dout; views of one buffer, as an exchange leaves them, or as a layer's projections do."""
    shapes = [(heads, width), (kv, width), (kv, value_width or width), (heads, value_width or width)]
    made = [torch.empty(batch, length, h, d, dtype=torch.bfloat16, device=CUDA).transpose(1, 2) for h, d in shapes]
    return exchanged(made) if buffer else made


def alike(made, given):
    for m, g in zip(made, given):
        assert (m.shape, m.dtype, m.device) == (g.shape, g.dtype, CUDA)


def calls(name, given, rule, documents=None, sinks=None, **how):
    """Forward and backward of the kernel of this name give what they should."""
    q, k, v, dout = given
    backend = choose_backend(name, CUDA, q.dtype, 128, rule.softcap is not None)
    out, lse, *grads = attend(backend, given, rule, documents, sinks, **how)
    alike([out, *grads], [dout, q, k, v])
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)


def of(form, buffer):
    """Tensors, rule, documents and sinks."""
    sizes = {k: v for k, v in form.items() if k in ("batch", "length", "width", "value_width")}
    sinks = torch.empty(8, device=CUDA) if "sinks" in form else None
    return tensors(buffer, **sizes), Rule(0.1, form.get("window"), form.get("softcap")), form.get("documents"), sinks


@pytest.mark.parametrize(
    "name, form", [(n, f) for n in KERNELS for f in FORMS if f != "a soft cap" or BACKENDS[n].softcap]
)
def test_calls(name, form, watch):
    calls_of = [(False, None), (True, None), (True, 512)]
    for buffer, chunk in calls_of if name in COUNTED.values() else calls_of[1:]:  # plain operators take any layout
        watch.kernels.clear()
        calls(name, *of(FORMS[form], buffer), chunk=chunk)
        check(watch, name)


def check(watch, name):
    """No problem was found, and no kernel ran but this one and those that it leaves calls to."""
    assert watch.problems == []
    mine = {name, BACKENDS[name].packed_by} & {*COUNTED.values()}
    assert {n.removesuffix(" backward") for n in watch.kernels} <= mine
    assert bool(watch.kernels) == bool(mine)
    assert all(len(layouts) == 1 for layouts in watch.graphs.values())


@pytest.mark.parametrize("width, values, took", [(192, 128, (192, 128)), (64, 100, (64, 104))])
def test_cudnn_takes_values_of_their_own_width(width, values, took, watch):
    """Zeros beside narrower ones would be a quarter more work for latent attention."""
    calls("cudnn", *of({"width": width, "value_width": values}, True))
    keys = [key for *_, key in watch.graphs]
    assert {(key[0][0][-1], key[2][0][-1]) for key in keys} == {took}


def attend_by_heads(layout, backend, given, documents):
    """Output and gradients of this rank's rows, by a layout that exchanges rows for heads."""
    q, k, v, dout = given
    qkv, how = layout.swap([q], [k, v]), {"rule": Rule(0.1), "cu_seqlens": documents}
    out, lse = layout.forward(backend, *qkv, **how)
    grads = layout.backward(backend, *layout.swap([dout]), Attended(*qkv, out, lse), **how)
    return [*layout.swap_back(out), *layout.swap_back(*grads)]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("heads, kv, ranks, documents", [(28, 4, 8, None), (9, 3, 4, [0, 1, 5, 300, 813, 1024])])
def test_uneven_heads(name, documents, heads, kv, ranks):
    """Each rank has rows of heads, over a process group that sends nothing."""
    with fake_ranks(ranks) as ctx, fake_cuda() as watch:
        given = q, k, v, _ = tensors(False, heads=heads, kv=kv, length=LENGTH // ranks, width=64)
        layout = layout_of(Exchange(ctx.sp_group), heads, kv, Sample(1, LENGTH, documents, CUDA))
        assert isinstance(layout, SplitHeads)
        alike(attend_by_heads(layout, choose_backend(name, CUDA, q.dtype, 64), given, documents), [q, q, k, v])
    check(watch, name)


BEYOND = """
cudnn     -> whole
cudnn     -> batch 2
cudnn     -> projections
cudnn     -> chunks
flash     -> documents
flash     -> a window
flash     -> projections
flash     -> chunks
efficient -> batch 2
efficient -> projections
efficient -> chunks
"""


def test_a_cudnn_graph_has_one_layout_of_out_and_dout(watch):
    """PyTorch up to 2.13 knows a graph for backward by the strides of q, k and v, and builds it for those of out and
    dout that come first: with others it reads them as if they were those."""
    q, k, v, dout = tensors(False, length=512)
    backend, rule = BACKENDS["cudnn"], Rule(0.1)
    out, lse = attention_forward(backend, q, k, v, rule=rule)
    for mine in (out, out.contiguous(), out.transpose(1, 3).contiguous().transpose(1, 3)):
        for theirs in (dout, dout.contiguous()):
            attention_backward(backend, theirs, Attended(q, k, v, mine, lse), rule=rule)
    assert [len(layouts) for (kind, *_), layouts in watch.graphs.items() if kind == "backward"] == [1]


@pytest.mark.parametrize("name, form", lines_of(BEYOND))
def test_no_kernel_counts_beyond_32_bits(name, form, watch):
    """One GPU at 600K tokens, one of 8 ranks at 2.2M: their queries have more than 2^31 elements. With chunks the keys
    have, where a kernel has them for each query head."""
    length, heads, kv = (2_200_000, 8, 1) if form == "chunks" else (600_000, 32, 8)
    batch = 2 if form == "batch 2" else 1
    q, k, v, dout = tensors(form != "projections", batch=batch, heads=heads, kv=kv, length=length)
    if form == "projections":  # heads before tokens in memory: any part of the rows spans all of them
        q, k, v, dout = (t.contiguous() for t in (q, k, v, dout))
    assert q.numel() >= 2**31
    documents = [0, 100_000, length] if form == "documents" else None
    backend, rule = BACKENDS[name], Rule(0.1, 4096 if form == "a window" else None)
    if form == "chunks":
        at = (slice(None), slice(None), slice(length - length % 4096 - 4096, length - length % 4096))
        seen = (slice(None), slice(None), slice(0, at[2].stop))
        out, lse = attention_forward(backend, q[at], k[seen], v[seen], rule=rule)
        kept = Attended(q[at], k[seen], v[seen], out, lse)
        alike(attention_backward(backend, dout[at], kept, rule=rule), kept[:3])
    else:
        calls(name, (q, k, v, dout), rule, documents)
    assert sum(watch.kernels.values()) < 2000
    check(watch, name)


@pytest.mark.parametrize("lengths, graphs", [(range(70_001, 70_031, 6), 2), (range(131_073, 139_000, 801), 4)])
def test_ragged_lengths_share_cudnn_graphs(lengths, graphs, watch, monkeypatch):
    """Each takes half a second to build and stays for ever, in each thread that runs it: there are 64 from one power of
    two to the next."""
    for threads in (1, 2):
        monkeypatch.setattr("fake.get_ident", lambda threads=threads: threads)
        for length in lengths:
            q, k, v, _ = tensors(True, length=length)
            attention_forward(BACKENDS["cudnn"], q, k, v, rule=Rule(0.1))
        assert len(watch.graphs) <= threads * graphs
    rows = [dict(zip("bhsd", key[2][0][0])) for key in watch.graphs]
    assert min(r["s"] for r in rows) > 0.9 * lengths[0], "the other kernel has more than the last rows"
    assert watch.problems == []


def test_a_window_alone_uploads_nothing(watch):
    """Every row is one document: the device counts their offsets by itself."""
    calls("flash", tensors(True), Rule(0.1, 300))
    assert watch.uploads == 0
    assert watch.kernels["flash backward"] == 1
