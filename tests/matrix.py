"""One net for whole training steps: models x ranks x data x weights x ways x tiles x states x engines x devices, each
case against plain transformers on one process. The devices are the CPU and the one on it (tests/device); a GPU runs
the same cases in tests/cuda/test_gpu_matrix.py.

`table` draws cases until every two values that may meet have met; `run` runs one on a rank; `check` judges it. A case
is named by its values, so that `pytest tests/test_matrix.py -k "gemma2 and zero3"` finds it.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import yaml
import zoo
from cases import attach, decoder_layers, freeze, plain_run, sample_of, small_pages, worst_error
from operators import nan_memory
from torch import nn
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridPreTrainedModel

import alstlib
from alstlib.base.sizing import Forward
from alstlib.data.loader import SPDataLoader
from alstlib.planner.measure.verify import in_full

EXACT = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-6, 1e-5)}
"""Largest error of the loss, relative to it, and of a gradient, relative to its norm. DeepSpeed trains in fp32."""
SCALE = 0.25
"""Of the loss before backward, and so of every gradient."""


@dataclass(frozen=True)
class Case:
    """One optimizer step of two micro-batches for each replica (one with a router's loss)."""

    model: str
    ranks: str = "2x1"
    """Sequence-parallel degree x replicas."""
    data: str = "whole"
    weights: str = "all"
    way: str = "layers"
    tiles: str = "small"
    states: str = "pass"
    engine: str = "average"
    device: str = "cpu"

    def __str__(self):
        return " ".join(value.replace(", ", "+").replace(" ", "_") for value in asdict(self).values())

    @property
    def sp(self):
        return int(self.ranks[0])

    @property
    def dp(self):
        return int(self.ranks[2])

    @property
    def dtype(self):
        return torch.float32 if self.engine.startswith("zero") else torch.float64

    @property
    def routed(self):
        """Whether the loss has a router's part."""
        return self.model in ROUTED


@dataclass(frozen=True)
class More:
    """What a test of its own asks of a case: values that the net does not draw."""

    options: dict[str, Any] = field(default_factory=dict)
    """Over those of the case, with the length of a block."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Of the model's config."""
    data: list[list[list[int]]] | None = None
    accumulation: int = 2
    blocks: tuple[int | None, ...] = ()
    """The length of a block in each of several optimizer steps, at a learning rate of 0; None: the step is whole."""
    host_memory: tuple[int | None, ...] = ()
    """Of each rank."""
    bucket: int = 2_000
    prepare: Callable[[Any], Callable[[], Any]] | None = None
    """Called with the model before it is attached; what it returns is called after the step, for the result."""


ALL_MODELS = {**zoo.MODELS, **zoo.MORE, **zoo.HYBRIDS, **zoo.MORE_HYBRIDS}
EXPERTS = [name for name, (_, fields) in ALL_MODELS.items() if any("experts" in field for field in fields)]
WITH_ROUTERS = [name for name, (_, fields) in ALL_MODELS.items() if fields.get("output_router_logits")]
RECORDED = GraniteMoeHybridPreTrainedModel._can_record_outputs or {}
ROUTED = [name for name in WITH_ROUTERS if "granitemoehybrid" not in name or "router_logits" in RECORDED]
"""Models whose router's loss plain transformers has: of this one only the newer versions."""
LONGEST = ["llama, LongRoPE", "llama, dynamic NTK"]
TABLE = yaml.safe_load(Path(__file__).with_name("matrix.yaml").read_text())
DATA, WEIGHTS, MORE_WEIGHTS, WAYS, TILES = (TABLE[name] for name in ("data", "weights", "more_weights", "way", "tiles"))
AXES = {one.name: [*TABLE.get(one.name, ALL_MODELS)] for one in fields(Case)}


def why_not(case):
    """Why the case is refused, which tests of refusals hold; empty where it runs."""
    if case.way in ("hidden", "host") and case.tiles == "off":
        return "hidden states on the host need the tiled loss"
    if case.model == "zamba2" and (case.engine in ("zero2", "zero3", "fsdp2") or case.device == "late"):
        return "its layers share weights, which only moving within CPU and CUDA keeps so"
    if case.model == "zamba" and case.weights == "tied":
        return "transformers cannot tie its embeddings besides its layers"
    if case.device != "cpu" and case.model in EXPERTS and case.engine == "zero3" and case.tiles == "off":
        return "a loop over experts calls an activation for each, which ZeRO-3 counts: its experts must be a leaf"
    if case.model in LONGEST and case.data.startswith("packed"):
        return "its frequencies are those of the sample's longest document, which plain transformers has not alone"
    if case.model == "llama, dynamic NTK" and case.dp > 1:
        return "its frequencies are those of the longest sample before, which another replica had"
    return ""


# ----- the draw


def table(seed=0):
    """Cases in which every two values of two axes that may meet do, each drawn to hold many new pairs; of those that
    hold as many, one of two ranks, which take the time of two."""
    dice, names = random.Random(seed), [*AXES]

    def pairs(values):
        return {(a, values[a], b, values[b]) for a, b in itertools.combinations(names, 2)}

    wanted = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in AXES[a] for y in AXES[b]}
    order, made = sorted(wanted), []
    dice.shuffle(order)
    for a, x, b, y in order:
        if (a, x, b, y) not in wanted:
            continue
        drawn = [{n: dice.choice(AXES[n]) for n in names} | {a: x, b: y} for _ in range(100)]
        if valid := [values for values in drawn if not why_not(Case(**values))]:
            best = max(valid, key=lambda values: (len(pairs(values) & wanted), values["ranks"] == "2x1"))
            made.append(Case(**best))
            wanted -= pairs(best)
    return made


def sample(cases):
    """Few of them, in which every value of every axis is."""
    made = []
    seen = set()
    for case in sorted(cases, key=lambda case: case.device == "late"):
        if new := set(asdict(case).items()) - seen:
            made.append(case)
            seen |= new
    return made


# ----- one case


def build(case, fields=None):
    hybrid = case.model in {**zoo.HYBRIDS, **zoo.MORE_HYBRIDS}
    more = {"tie_word_embeddings": True} if case.weights == "tied" else {}
    more |= {"output_router_logits": False} if case.model in WITH_ROUTERS and not case.routed else {}
    more |= fields or {}
    torch.set_default_dtype(case.dtype)  # for constants that a model works out when it is made
    try:
        model = (zoo.build_hybrid if hybrid else zoo.build)(case.model, case.dtype, **more)
    finally:
        torch.set_default_dtype(torch.float32)
    if hasattr(model, "set_experts_implementation") and (case.dtype == torch.float64 or case.device != "cpu"):
        model.set_experts_implementation("eager")  # the grouped kernel has no fp64, not that device, and bf16 on CUDA
    freeze(model, {**WEIGHTS, **MORE_WEIGHTS}[case.weights])
    return model


def samples_of(case, more=None):
    """The samples of one optimizer step; in the first one, the first rank has no token that counts."""
    more, made = more or More(), []
    data = more.data or DATA[case.data]
    for i in range(case.dp * (1 if case.routed else more.accumulation)):
        rows = data[i % len(data)]
        length = sum(rows[0])
        made.append(sample_of(length, len(rows), i, ignored=slice(0 if i else length // 2 + 1)))
        made[-1]["document_lengths"] = rows
    return made


def zero_config(stage, accumulation, bucket=2_000):
    """Of DeepSpeed, with buckets that are full and sent many times in a step of a small model."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": bucket}
    zero |= {f"stage3_{n}": bucket for n in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")}
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.0}},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip


class Average(nn.Module):
    """The smallest engine: averages gradients over all ranks after backward."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, **kwargs):
        return self.module(**kwargs)


def engine_of(model, kind, accumulation=1, bucket=2_000):
    """The model in an engine of that kind over all ranks, on the model's device."""
    if kind == "average":
        return Average(model)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    import deepspeed

    if next(model.parameters()).device.type == "cpu":
        from alstlib.runs.train import operators

        operators.leave_out()
    elif next(model.parameters()).device.type != "cuda":
        from device import accelerator

        accelerator.install()
    return deepspeed.initialize(model=model, config=zero_config(int(kind[4:]), accumulation, bucket))[0]


def gradients(model, kind):
    """Every gradient after the backward of an engine of that kind, whole, averaged over ranks, on the CPU."""
    found = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if kind.startswith("zero"):
            from deepspeed.utils import safe_get_full_grad

            grad = safe_get_full_grad(p)
        else:
            grad = torch.zeros_like(p) if p.grad is None and kind == "average" else p.grad
            # on the CPU, because gloo ends the process where it gathers tensors of a GPU (PyTorch's issue 152645)
            grad = grad.cpu().full_tensor() if hasattr(grad, "full_tensor") else grad
        if grad is not None:
            found[name] = grad.detach().to("cpu", copy=True)
            if kind == "average":
                dist.all_reduce(found[name])
                found[name] /= dist.get_world_size()
    return found


def backward(engine, batch, kind, block, last):
    """Forward and backward of one micro-batch as the engine wants them; returns what the loss function does."""
    deep = kind.startswith("zero")
    with engine.no_sync() if kind == "ddp" and not last else contextlib.nullcontext():
        if block is not None:
            known = last if kind == "fsdp2" else None
            out = alstlib.block_step(engine, batch, block, last_micro_batch=known)
        else:
            if kind == "fsdp2":
                engine.set_requires_gradient_sync(last)
            out = alstlib.causal_lm_loss(engine, batch)
            engine.backward(out.loss * SCALE) if deep else (out.loss * SCALE).backward()
    if deep and not last:
        engine.step()
    return out


@contextlib.contextmanager
def full_host():
    """What a forward keeps on the host is decided as if the host had no room: few layers keep their inputs."""
    kept = Forward.kept
    with mock.patch.object(Forward, "kept", lambda forward, room, disk=0: kept(forward, 0, disk)):
        yield


@contextlib.contextmanager
def late_copies(seed):
    """On a GPU: before each copy on a side stream, and before some on the compute stream, up to half a millisecond
    passes there."""
    dice, copy = random.Random(seed), torch.Tensor.copy_

    def later(self, *args, **kwargs):
        if torch.cuda.current_stream() != torch.cuda.default_stream() or dice.random() < 0.1:
            torch.cuda._sleep(dice.randrange(1_000_000))
        return copy(self, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "copy_", later):
        yield


@contextlib.contextmanager
def conditions(case, rank):
    """Short pages, and memory that is NaN until it is written; on the device, copies as late as can be, and ranks that
    come to their collectives at different times. Tiles that are not small stand for larger pages, of several chunks,
    and for a host that keeps the input of one layer in two."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_pages(1 if case.tiles == "small" else 20))
        if case.tiles != "small":
            stack.enter_context(full_host())
        if case.device == "late":
            from device import group, module

            group.delay(1000)
            stack.callback(group.delay, 0)
            stack.enter_context(module.late(module.NEVER, seed=rank))
        elif case.device == "cuda":
            stack.enter_context(late_copies(rank))
        elif case.engine == "average":
            stack.enter_context(nan_memory())
        yield


def run(rank, world, case, more=None):
    """The step on this rank: errors of loss and gradients, and the collectives of the device in their order."""
    with in_full() if case.dtype == torch.float64 else contextlib.nullcontext():
        return _run(rank, case, more or More())


def _run(rank, case, more):
    ctx, samples = alstlib.SPContext.create(case.sp), samples_of(case, more)
    accumulation, model = len(samples) // case.dp, build(case, more.fields)
    look = more.prepare(model) if more.prepare else lambda: None
    oracle = [plain_run(model, samples) if rank == 0 or more.prepare else None]  # the same on every rank
    dist.broadcast_object_list(oracle, device=torch.device("cpu"))
    (loss, want), place = oracle[0], None
    if case.device == "late":
        from device import group, module

        place = module.device()
        model = model.to(place)
        model.tie_weights()  # on a device of another kind each weight became one of its own
    elif case.device == "cuda":
        place = torch.device("cuda", 0)
        model = model.to(place)
    chosen = {**TILES[case.tiles], **WAYS[case.way], "linear_attention": case.states, **more.options}
    if more.host_memory:
        chosen["host_memory"] = more.host_memory[rank]
    blocks = (chosen.pop("block", None),)
    losses, errors, strange, calls = [], [], [], {}
    deep = case.engine.startswith("zero")
    with attach(model, ctx, **chosen) as handle:
        engine, arrived = engine_of(model, case.engine, accumulation, more.bucket), []
        for name, p in model.named_parameters() if deep else ():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
        mine = samples[ctx.dp_rank :: case.dp]
        for block in more.blocks or blocks:
            logged, scale = 0.0, 1.0 if block else SCALE
            loader = SPDataLoader(mine, ctx, accumulation, replicated=True, device=place)
            with conditions(case, rank):
                if case.device == "late":
                    group.calls()
                for i, batch in enumerate(loader):
                    out = backward(engine, batch, case.engine, block, i == accumulation - 1)
                    logged += float(out.mean) * int(out.tokens) / max(1, int(batch["step_tokens"]))
                for call in group.calls() if case.device == "late" else ():
                    if call.device:
                        calls.setdefault(call.group, []).append(call.op)
            got = {n: g / scale for n, g in gradients(model, case.engine).items()}
            del out
            leased = handle.store.leased
            engine.step() if deep else model.zero_grad()
            strange += [n for n, g in got.items() if n not in want and bool(g.any())]
            names = want.keys() & got.keys()
            losses.append(abs(logged - loss) / abs(loss))
            errors.append(worst_error(*({n: grads[n] for n in names} for grads in (got, want))))
        counted = (engine.global_steps, engine.micro_steps) if deep else None
        if deep:
            engine.destroy()
    error, name = max(errors)
    return {"loss": float(torch.tensor(losses).max()), "gradient": error, "name": name, "strange": strange,
            "calls": calls, "arrived": arrived, "leased": leased, "steps": counted, "seen": look(),
            "kept": handle.plan.attention_kept, "every": handle.plan.inputs_kept_every}  # fmt: skip


def check(results, case, bound=None):
    """Judges the ranks' results, with bounds of the errors of the loss and of a gradient."""
    loss, gradient = bound or EXACT[case.dtype]
    for rank, result in enumerate(results):
        assert result["loss"] < loss, (rank, result)
        assert result["gradient"] < gradient, (rank, result)
        assert not result["strange"], "gradients that plain transformers has not"
        assert result["leased"] == 0, "slabs that were not given back"
        assert result["arrived"] == results[0]["arrived"], "another order of gradients: ZeRO-2 mixes them"
        for group, calls in result["calls"].items():  # some groups have not all ranks
            others = [other["calls"][group] for other in results if group in other["calls"]]
            assert all(calls == other for other in others), f"{group}: another order of collectives, NCCL hangs"


def check_on(pools, case, bound=None, **more):
    """Runs the case on its ranks, with what a test of its own asks of it (`More`), and judges it; returns the ranks'
    results."""
    results = pools(case.sp * case.dp)(run, case, More(**more))
    check(results, case, bound)
    return results
