"""The closed form of a step's memory, read off the real code (`calibrate` writes `forms.json`).

One rank's step is simulated (`simulate`) with sizes that are prime: tokens, widths, heads, tiles. The bytes of every
tensor alive then factor into the names of what it is made of: 3788800000 says nothing, `2 R H` says tokens times width
in bf16. A *moment* is what is alive when memory stops growing for a while; the peak of any run is the largest of its
moments. Only those are kept that are the largest at some plausible sizes. The planner evaluates them in microseconds,
without torch; tests hold it against simulations at real sizes.

Names: R tokens of a rank; P ranks; H width; I width of the MLP; V vocabulary; L layers; q query heads per key/value
head; k key/value heads per rank; where ranks share those, K key/value heads, m ranks that share one, g query heads per
rank; where ranks have parts of heads, n key/value heads that a rank needs; d a quarter of the head width; C tokens of a
chunk; and tiles: M of the MLP, U of the loss, N of norms, D of attention's row sums. A moment within attention's
backward is marked `#kernel`: a GPU's kernel has a workspace of its own then.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

import alstlib
from alstlib.measure import hybrid_forms as hybrids
from alstlib.measure.fused_states import fused_states
from alstlib.measure.pruning import Term, prune, with_experts
from alstlib.measure.scope import Places, category
from alstlib.measure.simulate import PLENTY, drop_gradients, fake_ranks, shard_of, watch
from alstlib.offload.ledger import Ledger, _CpuInstrument
from alstlib.planner.model_shapes import EXPERTS as SPARSE
from alstlib.planner.model_shapes import LATENT as LATENTS
from alstlib.planner.model_shapes import SQUARE
from alstlib.planner.moments import KERNEL, of_tokens
from alstlib.streaming import chunked
from alstlib.tiled.compute import as_on

LAYERS, MIDDLE = 4, 1
"""Layers that are traced, and the one that stands for all further ones."""
MIDDLES = range(MIDDLE, LAYERS - 1)
"""Layers whose own moments are not looked at: the last one has all that they have."""
HEADS: dict[str, tuple[dict[str, int], int, str]] = {
    "one": ({"k": 5, "q": 137, "a": 139, "b": 23}, 1, "kq"),
    "whole": ({"P": 7, "k": 5, "q": 137, "a": 139, "b": 23}, 7, "Pkq"),
    "shared": ({"K": 5, "m": 7, "g": 17}, 35, "Kmg"),
    "parts": ({"P": 7, "K": 29, "q": 23, "n": 5}, 7, "Kq"),
}
"""How ranks share heads: the primes of each way, its ranks, and the names of its query heads. What goes over the wire
together is a sum: a is q + 2 (queries, keys, values), b is q + 1 (with gradients of queries 2 b), its prime a sixth."""
MULTI: dict[str, tuple[dict[str, int], int, str]] = {
    "one": ({"k": 137}, 1, "k"), "whole": ({"P": 7, "k": 137}, 7, "Pk"),
}  # fmt: skip
"""The same of decoders whose heads have a key and a value each."""
SIZES = {"d": 11, "I": 8 * 5000011, "V": 32_003, "R": 1009, "M": 373, "U": 379, "N": 409, "D": 353, "C": 359}
FINE, SINGLE = 151, 1013
"""An MLP's tile that is shorter than a chunk, and one that is longer than the slice."""
TAILS = {"M": 263, "U": 251, "N": 191, "c": 291}
"""What is left of R after whole tiles, counted as a whole one, and after two chunks."""
WIDTH = 8 * 131
"""The width is this times the query heads (transformers wants heads that divide it, and kernels of experts eights)."""
EXPERTS = {"E": 103, "T": 101}
LATENT = {"d": 47, "e": 41, "o": 53, "v": 89, "w": 71, "x": 277, "z": 61, "j": 31, "s": 113, "y": 37}
"""Of multi-head latent attention: e half the part of a key with the position, o half the other one, v half a value, w a
quarter of the latter two; x half of a query, a key and a value, and z a sixth of a key and a value; j of keys' latents,
s with the part with the position, y of queries' latents."""
NO_WINDOW: dict[str, Any] = {"sliding_window": None}
LIKE_LLAMA: dict[str, Any] = {"pad_token_id": 0, "no_rope_layers": [1] * LAYERS, **NO_WINDOW}
"""Of decoders that are the same as Llama (`moments.SAME`)."""
MIXED: dict[str, Any] = {
    "sliding_window": 10**9,
    "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(LAYERS)],
}
"""Both kinds of layers (with a table of positions each, where a model has two), whose window hides nothing:
`planner.attention_bytes` adds what a window takes."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {"use_sliding_window": False}, "qwen3": {}, "phi3": {"pad_token_id": 0, **NO_WINDOW},
    "olmo2": {}, "cohere": {}, "glm": {"pad_token_id": 0},
    "gemma2": {"attn_logit_softcapping": None, **MIXED}, "gemma3_text": MIXED,
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "logits_scaling": 3.0},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0, **NO_WINDOW},
    "gpt_neox": {}, "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "n_inner": SIZES["I"]},
    "mixtral": {"num_local_experts": EXPERTS["E"], "num_experts_per_tok": EXPERTS["T"], **NO_WINDOW},
    "qwen3_moe": {
        "num_experts": EXPERTS["E"], "num_experts_per_tok": EXPERTS["T"], "moe_intermediate_size": SIZES["I"],
    },
    "gpt_oss": {"num_local_experts": EXPERTS["E"], "num_experts_per_tok": EXPERTS["T"], **MIXED},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS["E"], "num_experts_per_tok": EXPERTS["T"], "moe_intermediate_size": SIZES["I"],
        "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "q_lora_rank": LATENT["y"], "kv_lora_rank": LATENT["j"], "qk_rope_head_dim": 2 * LATENT["e"],
        "qk_nope_head_dim": 2 * LATENT["o"], "v_head_dim": 2 * LATENT["v"],
    },
}  # fmt: skip
"""Decoders that have a form: transformers' model types, and the fields that they need."""
MULTIS = (*SQUARE, *LATENTS)
"""Decoders whose query heads have keys and values of their own. Those whose heads together are as wide as the model
(`SQUARE`): what has its width has d and the heads for names."""
FULL = ("llama",)
"""Those that are traced in fp32 too, and with parts of heads; others in bf16 with whole and shared heads. What is not
traced (it takes many minutes) is taken as if heads were whole."""
MOST = (*FULL, "qwen2", "qwen3")
"""Those that are traced with each tiled compute on and off; others as runs have them (`USUAL`), with whole heads."""
USUAL = [(True, True, True), (False, True, True), (True, False, True), (False, False, True), (False, False, False)]
"""Tiled MLP, norms and loss: everything, no MLP (one that cannot be tiled), and rows of the ablation. Decoders with
experts are traced with `EXPERTS_USUAL`."""
EXPERTS_USUAL = [(True, True, True, False), (False, True, True, False), (False, False, True, True)]
"""Tiled MLP, norms, loss, chunks: experts in tiles, or all their tokens in one."""

KEEP = ("all", "device", "device+attention", "host", "host+attention")
"""What is kept for backward, and where: everything (no checkpoints), or layers' inputs, and attention outputs too."""


@dataclass(frozen=True)
class Way:
    """What a form depends on besides sizes."""

    family: str
    dtype: str = "bf16"
    heads: str = "one"
    keep: str = "device"
    """`all` (no checkpoints), `device` or `host`; with `+attention`, attention outputs too."""
    mlp: bool = True
    norm: bool = True
    loss: bool = True
    chunk: bool = False
    fine: bool = False
    """Are the MLP's tiles shorter than the chunk?"""
    travels: bool = False
    """Do the hidden states of chunks lie on the host?"""
    by_heads: bool = False
    """Do ranks share the heads of layers with a state, or pass states?"""
    single: bool = False
    """Is the MLP's tile as long as the slice?"""

    @property
    def name(self) -> str:
        switches = ("mlp", "norm", "loss", "chunk", "fine", "travels", "by_heads", "single")
        on = [name for name in switches if getattr(self, name)]
        return "/".join([self.family, self.dtype, self.heads, self.keep, "+".join(on)])


class _Recorder(_CpuInstrument):
    """Keeps what was alive at each moment, as counts of (category, first pass of the middle layer?, bytes)."""

    def __init__(self, budget: int | None, record: bool) -> None:
        super().__init__(budget, record)
        self.made: dict[int, tuple[str, bool, int]] = {}
        self.alive: Counter[tuple[str, bool, int]] = Counter()
        self.moments: dict[frozenset[Any], str] = {}
        self.rising = ""

    def see(self, tensor: Tensor, operation: str = "") -> None:
        key = tensor.untyped_storage()._cdata
        before = self.live.get(key)
        super().see(tensor, operation)
        if self.place is None or self.live.get(key) is before or key in self.hosted:  # weights were there before
            return
        place, nbytes = self.live[key][2], self.live[key][1]
        if not nbytes:
            return
        first = torch._C._current_autograd_node() is None and f".{MIDDLE}" in place
        self.made[key] = (category(place), first, nbytes)
        self.alive[self.made[key]] += 1
        self.rising = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if "attention_for_cpu_backward" in str(func) and self.place is not None:
            self.moments.setdefault(frozenset(self.alive.items()), f"{self.place()}{KERNEL}")
        return out

    def _drop(self, key: int) -> None:
        if (made := self.made.pop(key, None)) is not None:
            if self.rising and not any(f".{i}" in self.rising for i in MIDDLES):
                self.moments.setdefault(frozenset(self.alive.items()), self.rising)
            self.rising = ""
            self.alive[made] -= 1
            if not self.alive[made]:
                del self.alive[made]
        super()._drop(key)

    def move(self, tensor: Tensor, place: str) -> None:
        super().move(tensor, place)
        if (made := self.made.get(tensor.untyped_storage()._cdata)) is None:
            return
        self.alive[made] -= 1
        self.made[tensor.untyped_storage()._cdata] = made = (category(place), *made[1:])
        self.alive[made] += 1

    def host(self, tensor: Tensor) -> None:
        super().host(tensor)
        if (made := self.made.pop(tensor.untyped_storage()._cdata, None)) is not None:
            self.alive[made] -= 1


class _Recording(Ledger):
    instrument = _Recorder


def trace(way: Way) -> tuple[dict[frozenset[Any], str], dict[str, int], dict[str, tuple[str, int]], str]:
    """One simulated step at prime sizes: its moments, the primes, the tiles' names with the width and element bytes
    that decide them, and the names of the query heads."""
    primes, ranks, query = (MULTI if way.family in MULTIS else HEADS)[way.heads]
    sizes = {**SIZES, **primes} | ({"M": FINE} if way.fine else {"M": SINGLE} if way.single else {})
    sizes |= (EXPERTS if routes(way.family) else {}) | (LATENT if way.family in LATENTS else {})
    sizes |= hybrids.sizes_of(way.family, way.by_heads) if way.family in hybrids.FAMILIES else {}
    config = prime_config(way.family, sizes, ranks, way.by_heads)
    tiles: dict[str, tuple[str, int]] = {"M": ("1 I", 2)} if routes(way.family) else {}

    def tile(width: int, element: int) -> int:
        names = factor(width, sizes, query)
        decided = {} if width == config.hidden_size else {"I": "M", "V": "U", "d": "D", "v": "D"}
        name = next((tile for size, tile in decided.items() if size in names[1]), "N")
        tiles[name] = (f"{names[0]:g} {names[1]}", element)
        return sizes[name]

    keep, _, outputs = way.keep.partition("+")
    mlp = sizes["M"] if way.mlp and routes(way.family) else way.mlp  # the tile of experts goes by bytes
    options = alstlib.Options(
        tiles={"mlp": mlp, "loss": way.loss, "norm": way.norm},
        checkpoint=keep != "all",
        offload="sync" if keep == "host" else False,
        save_attention=bool(outputs),
        chunk=sizes["C"] if way.chunk else None,
        on_host="hidden" if way.travels else "none",
        linear_attention="heads" if way.by_heads else "pass",
        host_memory=PLENTY,
    )
    dtype = torch.bfloat16 if way.dtype == "bf16" else torch.float32
    with fake_ranks(ranks) as ctx, as_on(tile), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    with (
        pages_as_chunks(), fake_ranks(ranks) as ctx, as_on(tile), fused_states(model),
        alstlib.apply(model, ctx, options) as handle, FakeTensorMode(allow_non_fake_inputs=True),
    ):  # fmt: skip
        drop_gradients(model.to_empty(device="cpu"))
        batch = shard_of(ctx, sizes["R"])
        alstlib.causal_lm_loss(model, batch).loss.backward()  # a checkpoint knows its layer from the first
        gc.collect()
        with Places(model) as places, _Recording(stores=[handle.store], place=places.now) as ledger:
            watch(handle, places, ledger)
            alstlib.causal_lm_loss(model, batch).loss.backward()
    recorder: Any = ledger._cpu
    return recorder.moments, sizes, tiles, query


@contextlib.contextmanager
def pages_as_chunks() -> Iterator[None]:
    """Pages of one chunk: `planner.activations` adds what longer ones take."""
    before, chunked.page_rows = chunked.page_rows, lambda rows, length: rows
    try:
        yield
    finally:
        chunked.page_rows = before


def prime_config(family: str, sizes: Mapping[str, int], ranks: int, by_heads: bool = False) -> Any:
    """The config of a decoder with these sizes."""
    kv = sizes.get("K", sizes.get("k", 1) * ranks)
    heads = kv * sizes["q"] if "q" in sizes else sizes["g"] * ranks if "g" in sizes else kv
    fields = {
        "vocab_size": sizes["V"], "hidden_size": (4 * sizes["d"] if family in SQUARE else WIDTH) * heads,
        "intermediate_size": sizes["I"],
        "head_dim": 2 * sizes["e"] if family in LATENTS else 4 * sizes["d"],
        "num_hidden_layers": LAYERS, "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, **FAMILIES.get(family, LIKE_LLAMA),
    }  # fmt: skip
    if family in hybrids.FAMILIES:
        own = {n: v for n, v in fields.items() if n not in LIKE_LLAMA}
        return hybrids.config_of(family, own, sizes, ranks, by_heads)
    return AutoConfig.for_model(family, **fields)


def factor(number: int, sizes: Mapping[str, int], query: str) -> tuple[float, str]:
    """(coefficient, names) of a number that is a product of sizes; the width, written H, has the query heads in it."""
    found: Counter[str] = Counter()
    more = hybrids.aliases(sizes, TAILS["c"]) if "J" in sizes else []
    for name, prime in [*more, *sizes.items(), ("H", WIDTH), *TAILS.items()]:
        while number % prime == 0:
            number //= prime
            found[name] += 1
    rest = number / math.prod(scale ** found[name] for name, scale in hybrids.SCALES.items())
    for _ in range(found["H"]):
        found.subtract(query)
    return rest, " ".join(f"{n}^{e}" if e != 1 else n for n, e in sorted(found.items()) if e)


def routes(family: str) -> bool:
    """Do layers of this family route to experts?"""
    return family in SPARSE or hybrids.is_sparse(family)


def split(number: int, sizes: Mapping[str, int], query: str) -> list[tuple[float, str]]:
    """A number as a sum of products: one, but where ranks have parts of heads. There tokens do not divide evenly, and
    what is within 1% of queries, keys and values of all of a rank's tokens counts as these; smaller parts are left
    out."""
    coefficient, names = factor(number, sizes, query)
    if "n" not in sizes or (coefficient == int(coefficient) <= SMALL):
        return [(coefficient, names)]
    queries, keys = sizes["K"] * sizes["q"], sizes["P"] * sizes["n"]
    for unit, base in ((sizes["R"] * sizes["d"], "R d"), (sizes["R"], "R")):
        for q, kv in ((1, 0), (0, 1), (1, 2), (2, 2), (1, 1)):
            times = number / unit / (q * queries + kv * keys)
            nearest = min((2**i for i in range(7)), key=lambda power: abs(times / power - 1))
            if abs(times / nearest - 1) < 0.012:
                first = [(float(q * nearest), " ".join(sorted(f"{base} K q".split())))] if q else []
                return first + ([(float(kv * nearest), " ".join(sorted(f"{base} P n".split())))] if kv else [])
    return []


SMALL = 64


def moments(way: Way) -> tuple[list[tuple[str, dict[Term, float]]], dict[str, Any]]:
    """The moments of a step as sums of terms, for any number of layers, and what decides the tiles."""
    snapshots, sizes, tiles, query = trace(way)
    found = sums(snapshots, sizes, query, chunks_make_wholes=not way.travels)
    return prune(
        found, sizes=hybrids.points(way.family, way.by_heads) or (with_experts if routes(way.family) else None)
    ), tiles


def sums(
    snapshots: Mapping[frozenset[Any], str], sizes: Mapping[str, int], query: str, chunks_make_wholes: bool = True
) -> list[tuple[str, dict[Term, float]]]:
    """What was alive at each moment, as a sum of terms."""
    names: dict[int, list[tuple[float, str]]] = {}
    found: list[tuple[str, dict[Term, float]]] = []
    for alive, place in snapshots.items():
        terms: Counter[Term] = Counter()
        for (kind, middle, nbytes), count in alive:
            if nbytes not in names:
                names[nbytes] = split(nbytes, sizes, query)
            for coefficient, what in names[nbytes]:
                if middle:  # stands for all layers but the others that are traced
                    terms[kind, " ".join(sorted([*what.split(), "L"]))] += count * coefficient
                    terms[kind, what] -= (LAYERS - 1) * count * coefficient
                else:
                    terms[kind, what] += count * coefficient
        whole_chunks(terms, chunks_make_wholes)
        if "n" in sizes:
            one_a_rank(terms, sizes["P"])
        found.append((place.removeprefix("model."), {t: c for t, c in sorted(terms.items()) if c}))
    return [m for m in found if all(c == int(c) and (abs(c) < ODD or not of_tokens(t)) for (_, t), c in m[1].items())]


def whole_chunks(terms: Counter[Term], make_wholes: bool = True) -> None:
    """What a moment has of two chunks and of the remaining tokens, it has of all tokens, however many chunks they make:
    where something of all tokens is kept in chunks (`make_wholes`). Otherwise the rest counts as a chunk."""
    for kind, names in [t for t in terms if "c" in t[1].split()]:
        count = terms.pop((kind, names))
        parts = names.split()
        full = " ".join(sorted("C" if n == "c" else n for n in parts))
        if make_wholes and count > 0 and terms[kind, full] >= 2 * count:
            terms[kind, full] -= 2 * count
            full = " ".join(sorted("R" if n == "c" else n for n in parts))
        terms[kind, full] += count


def one_a_rank(terms: Counter[Term], ranks: int) -> None:
    """Where ranks have parts of heads, keys' gradients arrive in as many pieces as there are ranks."""
    for kind, names in [t for t in terms if "n" in t[1].split() and "P" not in t[1].split()]:
        if terms[kind, names] % ranks == 0:
            terms[kind, " ".join(sorted(["P", *names.split()]))] += terms.pop((kind, names)) // ranks


ODD = 2000
"""A coefficient from which a number did not factor: the tail of a tile, smaller than the tile itself."""


def ways(families: Iterable[str]) -> Iterator[Way]:
    """Every way of these families that is calibrated."""
    either = (True, False)
    plain = itertools.product(KEEP, either, either, either, (False,))
    streamed = itertools.product(KEEP[1:], either, (False,), either, (True,))  # chunks need no tiles for norms
    fine = itertools.product(KEEP[1:], (True,), (False,), either, (True,), (True,))
    travelling = itertools.product(KEEP[3:], either, (False,), (True,), (True,), either, (True,))
    finer = (way for way in travelling if way[1] or not way[5])  # only tiles can be finer than the chunk
    how = list(itertools.chain(plain, streamed, fine, finer))
    usual = [way for way in how if (way[3] if len(way) > 4 and way[4] else tuple(way[1:4]) in USUAL)]
    few = [way for way in how if tuple(way[1:5]) in EXPERTS_USUAL]
    for family, dtype, heads in itertools.product(families, ("bf16", "fp32"), HEADS):
        if (dtype == "fp32" or heads == "parts") and family not in FULL:
            continue
        if dtype == "fp32" and heads not in ("one", "whole"):
            continue
        if family in hybrids.FAMILIES:
            yield from (Way(family, dtype, heads, *one) for one in hybrids.ways(family) if heads == "whole")
            continue
        if heads == "shared" and family not in MOST:
            continue
        for keep, *switches in how if family in MOST else few if family in SPARSE else usual:
            way = Way(family, dtype, heads, keep, *switches)
            if not (way.chunk and heads == "parts"):
                yield way
