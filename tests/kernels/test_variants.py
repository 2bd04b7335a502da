"""Attention variants: sliding windows, soft caps, sinks, values of another width; whole and in chunks."""

import itertools

import pytest
import torch
import yaml
from test_kernels import SHAPES as ALL_SHAPES
from test_kernels import check

from alstlib.kernels.backends import BACKENDS
from alstlib.kernels.spans import Span, pieces

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

SHAPES = {name: ALL_SHAPES[name] for name in ("gqa, odd", "batch 2", "more than a block", "one-token documents",
                                              "documents of batch 2", "document over a row's end")}  # fmt: skip
VARIANTS = yaml.safe_load("""
window 1: {window: 1, sinks: true}  # without a sink its scores have no gradient
window 5: {window: 5}
window 12: {window: 12}
window, whole: {window: 37}
sinks: {sinks: true}
wide values: {width: 12}
narrow values: {width: 4}
softcap: {softcap: 2.0}
all but softcap: {window: 5, sinks: true, width: 4}
all: {window: 5, sinks: true, width: 4, softcap: 2.0}
""")
ON_CPU = ["cpu", "blockwise", "eager"]


def runs(name, variant):
    return "softcap" not in variant or BACKENDS[name].softcap


CASES = [(name, key) for name in ON_CPU for key, variant in VARIANTS.items() if runs(name, variant)]


@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name, variant", CASES)
def test_variants_are_the_oracle(name, variant, shape, chunk):
    """In one call and in chunks of rows."""
    check(name, shape, variant=VARIANTS[variant], chunk=chunk and chunk * (29 if shape[3] > 100 else 1))


HALF = list(
    itertools.product(("gqa, odd", "more than a block", "one-token documents"), (torch.bfloat16, torch.float16))
)


@pytest.mark.parametrize("shape, dtype", HALF)
@pytest.mark.parametrize("name, variant", [("cpu", "all but softcap"), ("blockwise", "all")])
def test_variants_in_half_precision(name, variant, dtype, shape):
    """To the rounding of the inputs; compared with plain transformers in the same precision by the models' tests."""
    check(name, SHAPES[shape], dtype, VARIANTS[variant], tolerance=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("shape, dtype", HALF)
@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient", "blockwise"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_on_a_gpu(name, variant, dtype, shape):
    if runs(name, VARIANTS[variant]):
        check(name, SHAPES[shape], dtype, VARIANTS[variant], tolerance=0.02, device="cuda")


# ----- what a window is made of


def test_few_rows_behind_many_keys_are_few_calls():
    """The last chunk of a long sequence may be a row."""
    assert len(list(pieces(Span(0, 0, 1_000_001, 1, 0, 0), None, keys_per_query=4))) < 100
    chunk = list(pieces(Span(0, 0, 10_240, 256, 0, 0), None, keys_per_query=4))  # a laptop's: gradients of 4 keys a row
    assert {p.keys for p in chunk if p.kind == "full"} == {1024, 768}


def test_a_window_costs_only_what_it_sees():
    span = Span(0, 0, 4096, 4096, 0, 0)
    done = sum(p.repeat * p.queries * (p.keys if p.kind == "full" else (p.keys + 1) / 2) for p in pieces(span, 64))
    assert done == 64 * 65 // 2 + (4096 - 64) * 64
    assert len(list(pieces(span, 64))) <= 4  # equal blocks go in one call
