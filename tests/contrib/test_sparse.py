"""Sparse attention over pages: the choice and its gradients against the plain version, and what is never fetched."""

import re
from dataclasses import replace
from unittest import mock

import cases
import pytest
import torch
import yaml
import zoo
from cases import batch, check_refusals, check_step, gradients, make_model, same, small_pages, step
from operators import counted, error_of
from transformers import AttentionInterface

from alstlib.base.config import RunConfig
from alstlib.base.mesh import SPContext
from alstlib.base.reference import attention, causal_mask, relative_error
from alstlib.contrib.sparse import PageChoices, Sparse, select_pages
from alstlib.planner.measure.verify import in_full
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.streaming import streaming_of

CHUNK, PAGE, LENGTH = 4, 8, 45
SPARSE = Sparse(top=1, page=PAGE)
HOST = {"offload": "sync", "on_host": "hidden+kv"}


def attach(model, sparse, ctx=None, chunk=CHUNK, **how):
    handle = cases.attach(model, ctx, chunk=chunk, **how)
    if sparse is not None:
        select_pages(handle, sparse)
    return handle


def seen_pages(q, k, sparse, chunk, documents):
    """Boolean [B, K, S, S]: the keys that sparse attention over pages shows to each query and key/value head.

    Each chunk of queries sees its own page, and of the earlier pages that it would see the first, the last, and the
    `top` others with the best product of mean queries (summed over the heads of a key/value head) and mean keys.
    """
    q, k, page = q.detach(), k.detach(), sparse.page
    (batch, heads, length, _), kv_heads = q.shape, k.shape[1]
    allowed = causal_mask(batch, length, documents)
    seen = torch.zeros(batch, kv_heads, length, length, dtype=torch.bool)
    group = heads // kv_heads
    for b in range(batch):
        for lo in range(0, length, chunk):
            hi = min(lo + chunk, length)
            own = (hi - 1) // page
            pages = sorted({int(j) // page for j in allowed[b, lo:hi].any(0).nonzero()} - {own})
            always = [own, *pages[: sparse.first], *pages[max(0, len(pages) - sparse.last) :]]
            for h in range(kv_heads):
                query = q[b, h * group : (h + 1) * group, lo:hi].mean(1).sum(0)
                score = {p: float(query @ k[b, h, p * page : (p + 1) * page].mean(0)) for p in pages if p not in always}
                for p in [*always, *sorted(score, key=score.__getitem__)[max(0, len(score) - sparse.top) :]]:
                    seen[b, h, lo:hi, p * page : (p + 1) * page] = True
    return seen


def oracle(model, sample, chunk, sparse):
    """Loss and gradients of the plain model whose layers without a window attend to the pages that they see."""
    documents = sample["cu_seqlens"].tolist()

    def attend(module, q, k, v, *_, scaling, **how):
        window = how.get("sliding_window")
        seen = seen_pages(q, k, sparse, chunk, documents) if window is None else None
        out, _ = attention(
            q, k, v, scale=scaling, window=window, softcap=how.get("softcap"), sinks=how.get("s_aux"),
            documents=documents, seen=seen,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    with mock.patch.dict(AttentionInterface._global_mapping, {model.config._attn_implementation: attend}):
        logits = model(sample["input_ids"], position_ids=sample["position_ids"], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), sample["shift_labels"].flatten(), ignore_index=-100)
    model.zero_grad()
    loss.backward()
    return loss.item(), gradients(model)


def build(name, **overrides):
    if name == "gpt_oss":
        overrides = {"output_router_logits": False, **overrides}
    if name == "deepseek_v3":  # its experts are weighted in fp32
        overrides = {"first_k_dense_replace": 2, **overrides}
    model = zoo.build(name, torch.float64, **overrides)
    if getattr(model.config, "num_local_experts", 0) or getattr(model.config, "n_routed_experts", 0):
        model.set_experts_implementation("eager")  # the others do not run in fp64
    return model


def watched(monkeypatch):
    made = []
    plain = PageChoices.__init__
    monkeypatch.setattr(PageChoices, "__init__", lambda self, sparse: (made.append(self), plain(self, sparse))[1])
    return made


CASES = yaml.safe_load("""
grouped heads: [llama, {}]
9 heads on 3: ['llama, 9 heads on 3', {}]
documents: [llama, {documents: [2, 8, 32, 3]}]
batch: [llama, {rows: 2}]
MLA: [deepseek_v3, {}]
sinks, windows: [gpt_oss, {}]
soft caps, windows: [gemma2, {documents: [2, 8, 32, 3]}]
""")


@pytest.mark.parametrize("name, kind", CASES.values(), ids=CASES)
def test_sparse_pages_are_those_of_the_plain_version(name, kind):
    """Loss and every gradient, wherever tensors lie and whether outputs are kept; always the same bits."""
    model, sample, found = build(name), batch(LENGTH, **kind), []
    with in_full():
        want = oracle(model, sample, CHUNK, SPARSE)
        dense, _ = oracle(model, sample, CHUNK, Sparse(top=100, page=PAGE))
    assert abs(dense / want[0] - 1) > 1e-9, "nothing was left out"
    for how in ({}, HOST, {**HOST, "save_attention": True}):
        with attach(model, SPARSE, **how), in_full():
            found.append(step(model, sample))
        check_step(found[-1], want, 1e-12, 1e-12)
        assert found[-1][1].keys() == want[1].keys()
        # tokens that both samples of a batch have are added up in another order
        bits = {n: g for n, g in found[-1][1].items() if "rows" not in kind or "embed_tokens" not in n}
        assert same({n: found[0][1][n] for n in bits}, bits)


def shared(rank, world, name, documents):
    model, ctx, sparse = build(name), SPContext.create(world), Sparse(top=1, page=4 * world)
    want = oracle(model, batch(50, documents), 2 * world, sparse)
    with attach(model, sparse, ctx, 2, **HOST):
        got = step(model, batch(50, documents, world=world, rank=rank), ctx)
    assert got[1].keys() == want[1].keys()
    check_step(got, want, 1e-12, 1e-12)


@pytest.mark.parametrize(
    "name, documents",
    [("llama", []), ("llama, 7 heads on 1", []), ("llama, 9 heads on 3", [5, 39, 6])],
    ids=["whole heads", "a part of a head on each rank", "uneven heads, documents"],
)
def test_all_ranks_see_the_same_pages(ranks2, name, documents):
    ranks2(shared, name, documents)


@pytest.mark.parametrize(
    "name, kind",
    [("llama", {"rows": 2}), ("gpt_oss", {"documents": [2, 28, 3, 12]})],
    ids=["batch", "documents"],
)
def test_a_budget_that_covers_all_pages_is_dense_attention(name, kind):
    """Bit for bit, in fp32, with the pages that streaming chooses by itself. PyTorch's AVX2 kernels round gradients by
    how rows lie in memory (3e-7; with ATEN_CPU_CAPABILITY=default, bit for bit there too)."""
    rounding = 1e-6 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 0.0
    sample, found = batch(LENGTH, **kind), []
    for sparse in (None, Sparse(top=9), Sparse(top=0, first=9)):
        model = zoo.build(name)
        with small_pages(), attach(model, sparse, **HOST):
            found.append(step(model, sample))
        assert found[-1][0] == found[0][0]
        assert max(relative_error(found[-1][1][n], g) for n, g in found[0][1].items()) <= rounding


def test_pages_that_no_head_chose_are_not_fetched(monkeypatch):
    """Bytes that come from the host are those of the chosen pages, in forward, recompute and backward."""
    made, model, sample = watched(monkeypatch), make_model(), batch(64)
    with attach(model, SPARSE, save_attention=True, **HOST) as handle:
        step(model, sample)

    page, expected = PAGE * 2 * 2 * 8 * 4, 0  # of keys and values: 2 heads of width 8 in fp32
    for choices in made:
        assert any(c[0, 0].ne(c[0, 1]).any() for c in choices.made.values()), "heads choose alike"
        touched = set()
        for _, choice in sorted(choices.made.items(), reverse=True):
            seen = {*choice.any(0).any(0).nonzero().flatten().tolist()}
            assert len(seen) <= 4
            # forward; backward, with the sums of pages that have some
            expected += (2 * len(seen) + len(touched & seen)) * page
            touched |= seen
        expected += (64 // PAGE - 1 + len(touched)) * page  # each becomes the open one; the last still is
    width, kept, n = 32, 32 + 4, 64 // CHUNK  # attention outputs and logsumexps are kept
    forward, backward = (2 + 2) * width, 2 * (width * (3 - 1 / n) + kept) + 3 * width  # of hidden states, of two layers
    assert handle.store.bytes_fetched == expected + 4 * 64 * (forward + backward)


def test_the_planner_counts_the_pages_that_a_run_sees(monkeypatch, tmp_path):
    made, model, sample = watched(monkeypatch), make_model(), batch(61)
    run = RunConfig(options={"chunk": CHUNK, **HOST}, contrib={"sparse": {"top": SPARSE.top, "page": SPARSE.page}})
    with attach(model, Sparse(**run.contrib.sparse), **HOST):
        step(model, sample)
    seen = [int(c[0, head].sum()) for choices in made for c in choices.made.values() for head in (0, 1)]
    model.config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    plan = streaming_of(shape, run, 1, 61, 4, None)
    chunks = 61 / CHUNK
    assert sum(seen) == 2 * len(made) * plan.visits(chunks, plan.pages_of_head)
    assert plan.attention_share(chunks) < 1 == replace(plan, pages_of_head=None).attention_share(chunks)


def test_a_recompute_sees_what_forward_saw():
    """Pages are chosen once for each chunk and layer, also where the inputs of layers are made again."""
    model, sample, found = make_model(num_hidden_layers=4), batch(LENGTH), []
    for memory in (None, 45_000):
        with (
            counted(PageChoices, "_choose") as calls,
            attach(model, SPARSE, host_memory=memory, save_attention=False, **HOST) as handle,
        ):
            found.append(step(model, sample)[1])
        assert calls.total() == 4 * 12
    assert handle.plan.inputs_kept_every > 1
    assert same(*found)


def test_a_score_of_the_user():
    """It gets a chunk's queries and the mean keys of the pages before its own; the best scores are seen."""
    shapes = []

    def oldest(q, means):
        shapes.append((list(q.shape), list(means.shape)))
        return -torch.arange(means.shape[2], dtype=torch.float64).expand(means.shape[:3])

    model, sample = make_model(dtype=torch.float64), batch(40)
    with attach(model, Sparse(top=1, first=1, last=0, page=PAGE, score=oldest)):
        got = step(model, sample)
    want = oracle(model, sample, CHUNK, Sparse(top=0, first=2, last=0, page=PAGE))
    assert got[1].keys() == want[1].keys()
    check_step(got, want, 1e-12, 1e-12)
    assert shapes[0] == ([1, 4, 4, 8], [1, 2, 2, 8])
    with attach(model, Sparse(top=1, page=PAGE, score=lambda q, means: means.sum(-1)[0])):
        why = error_of(step, model, sample)
    assert re.search(r"score returned \[2, 3\], but must return .*: \[1, 2, 3\]", why)


REFUSED = r"""
select_pages(cases.attach(make_model()), SPARSE)     | work on layers that run in chunks
Sparse(top=-1)                                       | must be
Sparse(top=1, page=0)                                | must be
Sparse(top=1, score=5)                               | must be
attach(zoo.build("llama"), SPARSE, chunk=3) | page=8 is not a multiple of chunk \* sp = 3 \* 1 tokens: use page=9
attach(zoo.build("mistral"), Sparse(top=1), chunk=3) | no layer of MistralForCausalLM attends to all keys
attach(states_alone, Sparse(top=1), chunk=3)         | no layer of Qwen3NextForCausalLM attends to all keys
"""


def test_what_is_refused_and_what_is_said():
    states_alone = zoo.build_hybrid("qwen3_next", layer_types=["linear_attention"] * 2)
    check_refusals(REFUSED, {**globals(), **locals()})
    with attach(zoo.build("gpt_oss"), Sparse(top=1), chunk=3) as handle:
        (note,) = [n for n in handle.notes if n.startswith("sparse")]
    assert "is approximated" in note
    assert "1 of 2 layers have sliding windows and stay exact" in note
