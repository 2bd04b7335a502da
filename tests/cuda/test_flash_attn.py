"""flash-attn 2, 3 and 4 are called as their released packages want to be called: their own signatures, written down
here, in place of the packages, under fake CUDA."""

import importlib
import inspect
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from fake import fake_cuda
from test_kernel_calls import CUDA, FORMS, calls, of

from alstlib.kernels import backends
from alstlib.kernels.backends import PACKAGES

SIGNATURES = {
    "flash_attention_2": ("flash-attn 2.8.3.post2", {
        "_flash_attn_forward": "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, "
        "softcap, alibi_slopes, return_softmax",
        "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, "
        "window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None",
        "_flash_attn_varlen_forward": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
        "softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, "
        "return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False",
        "_flash_attn_varlen_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, "
        "max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, "
        "alibi_slopes, deterministic, rng_state=None, zero_tensors=False",
    }),
    "flash_attention_3": ("flash-attn-3 3.0.0, commit 0251105a of Dao-AILab/flash-attention", {
        "_flash_attn_forward": "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, "
        "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, "
        "seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
        "window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0",
        "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, "
        "sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, "
        "is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0",
    }),
    "flash_attention_4": ("flash-attn-4 4.0.0b36", {
        "_flash_attn_fwd": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, "
        "softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, "
        "mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, "
        "score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None, "
        "aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, "
        "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
        "gather_bwd_recompute_p=False",
        "_flash_attn_bwd": "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, "
        "window_size_left=None, window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, "
        "pack_gqa=False, num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, "
        "AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, "
        "seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, "
        "dv=None, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, "
        "block_sparse_tensors=None, dlse=None, learnable_sink=None",
    }),
}  # fmt: skip
"""Of each kernel, the package that was read, and the parameters of its functions with their defaults."""


class Package:
    """Stands in for a package: takes what its functions take, checks it, gives back what they give back."""

    def __init__(self, name, watch):
        self.name, self.watch, self.packed = name, watch, 0
        self.softcaps = set()
        """With which it was called."""
        self.module = types.ModuleType(PACKAGES[name][0])
        for function, parameters in SIGNATURES[name][1].items():
            bind = eval(f"lambda {parameters}: locals()")
            setattr(self.module, function, lambda *args, bind=bind, **kwargs: self.call(bind(*args, **kwargs)))

    def call(self, given):
        """What the function gives back for these arguments, by their names in any of the packages."""
        same = {"causal": given.get("is_causal"), "lse": given.get("softmax_lse"), "return_lse": True}
        a = SimpleNamespace(**{"cu_seqlens_q": None, **same, **given})
        q, k, v, offsets, of_four = a.q, a.k, a.v, a.cu_seqlens_q, self.name == "flash_attention_4"
        shape = (q.shape[0], q.shape[2], q.shape[1]) if offsets is None else (q.shape[1], q.shape[0])
        left, right, none = a.window_size_left, a.window_size_right, None if of_four else -1
        self.softcaps.add(a.softcap)
        self.packed += offsets is not None
        needs = {
            "one width": q.shape[-1] == k.shape[-1] == v.shape[-1],
            "heads over those of keys": q.shape[-2] % k.shape[-2] == 0 and v.shape == k.shape,
            "queries like keys": q.ndim == (4 if offsets is None else 3) and q.shape[0] == k.shape[0],
        }
        if offsets is None:
            needs["no window without offsets"] = (left, right) == (none, none)
        else:
            needs |= {
                "one tensor of offsets": offsets is a.cu_seqlens_k,
                "offsets in int32 on the device": offsets.dtype == torch.int32 and offsets.is_cuda,
                "a longest document inside": 0 < a.max_seqlen_q == a.max_seqlen_k <= q.shape[0],
                "causal documents": bool(a.causal), "a window of the past": left == none or left >= 0 == (right or 0),
            }  # fmt: skip
        made = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=CUDA)
        lse = torch.empty(shape, dtype=torch.float32, device=CUDA) if a.return_lse else None
        out, tensors = (made, lse, None, None), {}
        if "dout" in given:
            tensors, out = {"dout": a.dout, "out": a.out}, tuple(torch.empty_like(t) for t in (q, k, v))
            fits = a.lse.dtype == torch.float32 and a.lse.is_contiguous() and tuple(a.lse.shape) == shape
            needs["lse in fp32, contiguous, by heads"] = fits
            if not of_four:
                given_back, out = zip((a.dq, a.dk, a.dv), (q, k, v)), None
                needs["room for gradients"] = all(g.shape == t.shape and g.stride(-1) == 1 for g, t in given_back)
        self.watch.need_tensors(self.name, q=q, k=k, v=v, **tensors)
        self.watch.need(self.name, given, needs)
        return out


@pytest.fixture
def package(request, monkeypatch):
    with fake_cuda() as watch:
        found = Package(request.param, watch)
        for name in ("flash_attn", "flash_attn.cute", found.module.__name__):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, found.module.__name__, found.module)
        monkeypatch.setattr(backends, "_installed", lambda module: True)
        yield found


ALL = {**FORMS, "a soft cap and a window": {"softcap": 30.0, "window": 300}}
CASES = [(f, i) for i, f in ALL.items() if f.get("width") != 36]  # which they do not take


@pytest.mark.parametrize("form", [f for f, _ in CASES], ids=[i for _, i in CASES])
@pytest.mark.parametrize("package", SIGNATURES, indirect=True)
def test_calls(package, form):
    given, rule, documents, sinks = of(form, True)
    for chunk in (None, 512):
        calls(package.name, given, rule, documents, sinks, chunk=chunk)
        assert package.watch.problems == []
        assert not package.watch.kernels, "documents went to another kernel"
        cut = documents is not None or (rule.window is not None and rule.window < given[0].shape[2])
        assert chunk is not None or package.packed == (2 if cut else 0)
    assert package.softcaps <= ({rule.softcap} if rule.softcap else {None, 0.0})


@pytest.mark.parametrize("name", SIGNATURES)
def test_installed_packages_are_those_that_were_read(name):
    module, package, *_ = PACKAGES[name]
    try:
        found = importlib.import_module(module)
    except ImportError as e:
        pytest.skip(f"{package} is not installed here: {e}")
    for function, parameters in SIGNATURES[name][1].items():
        real = getattr(found, function)
        real = inspect.signature(getattr(real, "_init_fn", real)).parameters.values()
        read = inspect.signature(eval(f"lambda {parameters}: None")).parameters.values()
        assert [(p.name, p.default) for p in real] == [(p.name, p.default) for p in read], SIGNATURES[name][0]
