"""The comparison behind `alst verify`: one step of a small model (`small`), attached with the chosen options on real
ranks, is compared in loss and gradients with plain transformers, and the first module that differs is named. The tests'
sweep over all types of models uses the same functions."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import alstlib
from alstlib.base import sizing
from alstlib.base.options import TiledPart
from alstlib.base.sizing import heads_of
from alstlib.base.units import IGNORE
from alstlib.data.shard import shard_batch
from alstlib.hf.loading.models import model_config
from alstlib.hf.support import check_model
from alstlib.planner.measure.deep import kinds_of_layers
from alstlib.planner.measure.simulate import decoder_layers
from alstlib.planner.measure.small import LONGEST, VOCAB, build, first_of_each, kinds_in_lists, shrunk

REFUSALS = (ValueError, NotImplementedError)
EXACT = {torch.float32: (1e-6, 1e-5), torch.float64: (1e-9, 1e-9)}
"""Largest relative error of the loss and of a gradient. What is not exact in fp32 is judged again in fp64: some
gradients are zero but for rounding (that of a key's bias), and rounding decides a router's close calls."""
MOST = {"tiles.mlp": 5, "tiles.norm": 6, "tiles.loss": 7, "chunk": 4, "block": 5}
"""Tokens of tiles, chunks and blocks at most: shorter than a rank's slice, and odd."""

Reference = tuple[float, dict[str, Tensor]]
Outcome = dict[str, Any]


@contextlib.contextmanager
def in_full() -> Iterator[None]:
    """Keep fp64 where a model's own code asks for fp32, in norms and softmax; also in what backward recomputes."""

    def keep(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if args[0].dtype != torch.float32:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
                kwargs = {n: torch.float64 if a is torch.float32 else a for n, a in kwargs.items()}
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(Tensor, "float", lambda x: x.to(torch.float32)))
        for owner, name in ((Tensor, "to"), (Tensor, "type"), (torch, "sum"), (torch.nn.functional, "softmax")):
            patches.enter_context(mock.patch.object(owner, name, keep(getattr(owner, name))))
        yield


def sample(length: int, packed: bool) -> dict[str, Any]:
    """Random tokens, some without a label. Of the documents of a packed sample one has a single token, and one lies on
    several ranks."""
    ids = torch.randint(4, VOCAB, (1, length), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[:, 19:23] = IGNORE
    lengths = [3, 1, 10]
    while (left := length - sum(lengths)) > 0:
        lengths.append(min(LONGEST, left))
    return {"input_ids": ids, "labels": labels, "document_lengths": [lengths if packed else [length]]}


def plain(model: Any, data: Mapping[str, Any]) -> Reference:
    """Plain transformers, documents one by one, each a sample of its own: the mean over all labels, and gradients."""
    model, (lengths,) = copy.deepcopy(model), data["document_lengths"]
    config = model.config.get_text_config()
    shifted = [nn.functional.pad(y[:, 1:], (0, 1), value=IGNORE) for y in data["labels"].split(lengths, 1)]
    tokens = sum(int((y != IGNORE).sum()) for y in shifted)
    total: Any = 0.0
    routed = []
    for ids, y in zip(data["input_ids"].split(lengths, 1), shifted):
        mask = torch.ones_like(ids)  # as a collator gives it: eager Moshi of transformers 5.17 is not causal without
        out = model(input_ids=ids, attention_mask=mask, use_cache=False)
        logits = out.logits.to(torch.promote_types(out.logits.dtype, torch.float32))
        total = total + nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / tokens
        routed += [out.router_logits] if getattr(config, "output_router_logits", False) else []
    if routed:  # over all documents of the sample at once
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        experts = getattr(config, "num_local_experts", None) or config.num_experts
        joined: Any = tuple(torch.cat(parts) for parts in zip(*routed))
        balance = load_balancing_loss_func(joined, experts, config.num_experts_per_tok)
        total = total + config.router_aux_loss_coef * balance
    total.backward()
    return total.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def attached_step(handle: alstlib.Handle, data: Mapping[str, Any], block: int | None = None) -> Reference:
    """The same of an attached model on this rank's shard, with gradients averaged over ranks as an engine does."""
    model, ctx = handle.model, handle.ctx
    model.zero_grad()
    batch = shard_batch(data, ctx.sp, ctx.sp_rank, images=handle.images)
    if block is None:
        out = alstlib.causal_lm_loss(model, batch)
        out.loss.backward()
    else:
        out = alstlib.block_step(model, batch, block)
    grads = {}
    for n, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        if ctx.sp > 1:
            dist.all_reduce(grad, group=ctx.sp_group)
        grads[n] = grad / ctx.sp
    return out.mean.item(), grads


def errors_of(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """Error of each gradient relative to its norm, whose floor is 1e-6 of the largest norm; infinite where it is not a
    number, which `max` would pass over, and where plain transformers has none and it is not zero."""
    floor = max(float(w.norm()) for w in want.values()) * 1e-6
    errors = {n: float((got[n].double() - w.double()).norm()) / max(float(w.norm()), floor) for n, w in want.items()}
    errors = {n: float("inf") if math.isnan(error) else error for n, error in errors.items()}
    return errors | {n: float("inf") for n, g in got.items() if n not in want and bool(g.any())}


def why(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def compare(
    model: Any, ctx: alstlib.SPContext, options: alstlib.Options, data: Mapping[str, Any],
    reference: Callable[[Any], Reference], exact: Mapping[torch.dtype, tuple[float, float]] = EXACT,
    block: int | None = None,
) -> Outcome:  # fmt: skip
    """One step: `result` is exact, wrong, refused (by `apply`, or by blocks), crash, or not built (by plain
    transformers); with the errors, or the reason."""
    state = copy.deepcopy(model.state_dict())
    try:
        handle = alstlib.apply(model, ctx, options)
    except REFUSALS as e:
        return {"result": "refused", "reason": why(e)}
    except Exception as e:
        return {"result": "crash", "reason": f"apply: {why(e)}"}
    try:
        with handle:
            if block is not None and handle.facts.not_by_blocks:
                return {"result": "refused", "reason": f"ValueError: {handle.facts.not_by_blocks}"}
            mean, got = attached_step(handle, data, block)
    except Exception as e:
        return {"result": "crash", "reason": why(e)}
    try:
        loss, want = reference(model)
    except Exception as e:
        return {"result": "not built", "reason": f"plain transformers: {why(e)}"}
    errors, loss_error = errors_of(got, want), abs(mean - loss) / abs(loss)
    wrong = [n for n, error in errors.items() if not error < exact[model.dtype][1]]
    changed = next((n for n, t in model.state_dict().items() if not torch.equal(t, state[n])), None)
    made = {"dtype": str(model.dtype), "loss": loss_error, "gradient": max(errors.values()), "notes": handle.notes}
    if loss_error < exact[model.dtype][0] and not wrong and changed is None:
        return {"result": "exact", "reason": "", **made}
    with alstlib.apply(model, ctx, options) as handle, _watched(model) as seen:  # hooks change what a step leaves out
        attached_step(handle, data, block)
    with _watched(model) as expected:
        reference(model)
    nearest = f"gradient of {last_run(wrong, {name: i for i, name in enumerate(seen)})}" if wrong else "loss"
    made["first"] = first_difference(model, ctx, data["input_ids"].shape[1], seen, expected, exact[model.dtype][1])
    return {"result": "wrong", "reason": f"{changed} has changed" if changed else nearest, **made}


def judge(make: Callable[[torch.dtype], Any], cases: Mapping[str, Callable[[Any], Outcome]]) -> dict[str, Outcome]:
    """The outcome of each case for the model that `make` gives: in fp32, and in fp64 what is wrong in fp32."""
    model = make(torch.float32)
    outcomes = {name: case(model) for name, case in cases.items()}
    if wrong := [name for name, outcome in outcomes.items() if outcome["result"] == "wrong"]:
        with in_full():
            wide = make(torch.float64)
            again = {name: cases[name](wide) for name in wrong}
        outcomes |= {name: outcome for name, outcome in again.items() if outcome["result"] in ("exact", "wrong")}
    return outcomes


# ----- what differs


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collects the outputs of each module in the order in which their first calls end; also of the model's copies."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, module: nn.Module, args: Any, out: Any) -> None:
        tensors = [t.detach() for t in tree_leaves(out) if isinstance(t, Tensor) and t.ndim > 1]
        seen.setdefault(name, []).extend(t.flatten(0, 1) if t.ndim > 2 else t for t in tensors[:1])

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(functools.partial(note, name)).remove)
        yield seen


def last_run(parameters: Iterable[str], order: Mapping[str, int]) -> str:
    """The parameter whose module runs last: backward comes there first, so of wrong gradients it is nearest to the
    mistake. A module that is not called counts as the one around it.

    Args:
        order: of modules; the model itself is the last.
    """

    def place(parameter: str) -> int:
        module = parameter.rpartition(".")[0]
        while module and module not in order:
            module = module.rpartition(".")[0]
        return order.get(module, len(order))

    return max(parameters, key=place)


def of_first_pass(pieces: list[Tensor], count: int) -> Tensor | None:
    """The first `count` rows, where pieces make up just as many: what follows is a recompute, or a further sample."""
    ends = [*itertools.accumulate(map(len, pieces))]
    if count not in ends or len({p.shape[1:] for p in pieces}) > 1:
        return None
    return torch.cat(pieces[: ends.index(count) + 1])


def first_difference(
    model: Any, ctx: alstlib.SPContext, length: int, seen: Mapping[str, list[Tensor]],
    expected: Mapping[str, list[Tensor]], off: float,
) -> Outcome:  # fmt: skip
    """The first module whose output in a sample of `length` tokens differs from plain transformers' on this rank's
    slice by ten times the error `off`, if any does: of `_watched` modules."""
    rows, limit = -(-length // ctx.sp), off * 10
    mine = slice(ctx.sp_rank * rows, min(length, (ctx.sp_rank + 1) * rows))
    for order, (name, outputs) in enumerate(expected.items()):
        ours, theirs = of_first_pass(seen.get(name, []), rows), of_first_pass(outputs, length)
        if ours is None or theirs is None or ours[0].shape != theirs[0].shape:
            continue
        theirs = theirs[mine].to(ours.device, torch.float64)
        error = float((ours[: len(theirs)].double() - theirs).norm() / theirs.norm().clamp_min(1e-30))
        if not error < limit:
            return {"module": name, "kind": type(model.get_submodule(name)).__name__, "error": error, "order": order}
    return {}


# ----- alst verify


def small_options(given: Mapping[str, Any]) -> tuple[alstlib.Options, int | None, dict[str, list[Any]]]:
    """The options and the block, with tiles, chunks and blocks so small that a slice has several; and what they were.
    All MoE layers are taken as token-wise, because the comparison shows those that are not.

    Raises:
        ValueError: no option, or one that is no proof of anything.
    """
    block, parts = given.get("block"), get_args(TiledPart)
    options = alstlib.Options(**{n: v for n, v in given.items() if n != "block"})
    if block is not None and options.chunk is not None:
        raise ValueError(
            "--block (of the whole model) and --set chunk (of each layer) exclude each other: give only one of them"
        )
    was: dict[str, Any] = {f"tiles.{part}": options.tile(part) for part in parts}
    was |= {"chunk": options.chunk, "block": block}
    now = {n: MOST[n] if v in (True, "auto") else min(v, MOST[n]) for n, v in was.items() if v}
    tiles = {part: now.get(f"tiles.{part}", False) for part in parts}
    small = options.replace(tiles=tiles, chunk=now.get("chunk"), experts_by_token=True)
    return small, now.get("block"), {n: [was[n], v] for n, v in now.items()}


def _differences(config: Any, small: Any) -> dict[str, list[Any]]:
    """Numbers and settings of the config that the small one has otherwise."""
    was, now = config.to_dict(), small.to_dict()
    found = {n: [was[n], now[n]] for n in was if n in now and was[n] != now[n] and not isinstance(was[n], dict | list)}
    ours = ("_token_id", "_version", "dtype", "_name_or_path", "_cache")
    return {n: v for n, v in found.items() if not n.endswith(ours)}


def _at_full_size(config: Any, options: alstlib.Options, trust: bool) -> list[Any]:
    """The kinds of layers of the model as it is, which is built without memory.

    Raises:
        ValueError: `apply` refuses it.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
        kinds = kinds_of_layers(decoder_layers(model))
    except Exception:  # a model that computes with values while it is built; the small one is checked
        return kinds_in_lists(config.get_text_config())
    check_model(model, options.attention)
    return kinds


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Tiny models have much to warn about: only what we print is said."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@quiet()
def verify(question: Mapping[str, Any]) -> dict[str, Any]:
    """One rank of `alst verify` (`alstlib.runs.verify` asks, and says what comes of it)."""
    trust, sp, made = question["trust_remote_code"], question["sp"], {}
    try:
        options, block, tiles = small_options(question["options"])
        config = model_config(question["model"], question["config"], trust)
        made = {"model_type": config.model_type, "tiles": tiles, "notes": []}
        kinds = _at_full_size(config, options, trust)
        small = shrunk(config, first_of_each(kinds), question["config"])
        text = small.get_text_config()
        if any(kind in str(getattr(text, "rope_parameters", "")) for kind in ("longrope", "dynamic")):
            made["notes"] += [
                "RoPE depends on the length: that of a packed sample's longest document (here all are short)"
            ]
        first = build(small, trust_remote_code=trust)
        made["small"] = {
            "changes": _differences(config.get_text_config(), text), "heads": heads_of(text)[:2],
            "layer_kinds": [len({*kinds_of_layers(decoder_layers(first))}), len({*kinds})],
        }  # fmt: skip
    except Exception as e:
        reason = str(e) if isinstance(e, ValueError) else f"a small model cannot be built: {why(e)}"
        if "Unrecognized configuration class" in reason:
            reason = f"transformers has no causal language model of the type {made['model_type']}"
        more = "; --trust-remote-code runs it" if "custom code" in reason and not trust else ""
        return {**made, "cases": [], "refused": reason.partition("\n")[0].strip(" .") + more}
    cases = []
    for degree in dict.fromkeys((1, sp)):
        ctx = alstlib.SPContext() if degree == 1 else alstlib.SPContext.create(sp)
        data = {name: sample(max(33, 11 * sp), name == "packed") for name in ("whole", "packed")}
        with mock.patch.object(sizing, "LEAST_KEYS", 1):  # pages of one chunk
            case = functools.partial(compare, ctx=ctx, options=options, block=block)
            run = {
                n: functools.partial(case, data=d, reference=functools.partial(plain, data=d)) for n, d in data.items()
            }
            outcomes = judge(lambda dtype: build(small, dtype, trust_remote_code=trust), run)
        cases += [{"sp": degree, "sample": name, **outcome} for name, outcome in outcomes.items()]
        if any(outcome["result"] not in ("exact", "wrong") for outcome in outcomes.values()):
            break
    return {**made, "cases": cases}
