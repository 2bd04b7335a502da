"""Steps block by block: the gradients of plain transformers, under every engine, in memory of a block and its pages."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from cases import make_model, make_samples, plain_run, slopes, worst_error, wrap
from matrix import zero_config
from test_gradients import varied
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

import alstlib
from alstlib.data.loader import SPDataLoader
from alstlib.data.shard import shard_batch
from alstlib.measure.verify import in_full
from alstlib.offload.host_store import HostOutOfMemory
from alstlib.offload.ledger import Ledger
from alstlib.tiled import loss as tiled_loss
from alstlib.train import operators

LENGTH = 21
PACKED = [3, 1, 9, 8]
"""Documents of a packed sample: one of a token, one that spans blocks and ranks."""
HOST: dict[str, Any] = {"offload": "sync", "kv": "host"}


def sample(documents: list[int] | None = None, rows: int = 1, padding: int = 0) -> dict[str, Any]:
    """Tokens and labels; from token 8 to 16 none counts, which at some sizes is all of a block."""
    ids = torch.randint(3, zoo.VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[:, 8:17] = -100
    made: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if padding:
        mask = torch.ones_like(ids)
        mask[-1, LENGTH - padding :] = 0
        made["attention_mask"] = mask
    return {**made, "document_lengths": [documents]} if documents else made


def plain(model: Any, data: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Plain transformers on one process, in the model's precision; documents one by one."""
    model, total = copy.deepcopy(model), torch.zeros(())
    lengths = data.get("document_lengths", [[LENGTH]])[0]
    labels = data["labels"].masked_fill(data.get("attention_mask", torch.ones_like(data["labels"])) == 0, -100)
    shifted = [nn.functional.pad(y[:, 1:], (0, 1), value=-100) for y in labels.split(lengths, 1)]
    tokens = sum(int((y != -100).sum()) for y in shifted)
    for ids, y in zip(data["input_ids"].split(lengths, 1), shifted):
        logits = model(input_ids=ids, use_cache=False).logits
        total = total + nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / tokens
    total.backward()
    return total.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gradients(model: Any, world: int = 1, names: Any = ()) -> dict[str, Tensor]:
    """Of this rank, averaged over ranks as an engine does."""
    found = {}
    for n, p in model.named_parameters():
        if p.grad is None and n not in names:
            continue
        grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        if world > 1:
            torch.distributed.all_reduce(grad)
        found[n] = grad / world
    return found


def exact(rank: int, world: int, name: str, data: dict[str, Any], runs: list[tuple[int, dict[str, Any]]]) -> list[Any]:
    """Errors of loss and gradients of an fp64 model for each (block, options)."""
    ctx = alstlib.SPContext.create(world)
    model = zoo.build(name, torch.float64)
    model.set_experts_implementation("eager")
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False
    with in_full():
        loss, want = plain(model, data)
    shard, found = shard_batch(data, world, rank), []
    for block, options in runs:
        with alstlib.apply(model, ctx, alstlib.Options(**options)) as handle, in_full():
            model.zero_grad()
            out = alstlib.block_step(model, shard, ctx, block)
            error, where = worst_error(gradients(model, world, want), want)
            assert handle.kv_on_host == (options.get("kv") == "host" and block < shard["input_ids"].shape[1])
            gc.collect()
            assert handle.store.nbytes == handle.store.unused, "a slab was not given back"
        assert not out.loss.requires_grad
        found.append((block, options, abs(out.mean.item() / loss - 1), error, where))
    return found


LESS = {"tiled_mlp": False, "tiled_norm": False, "tiled_loss": False, "checkpoint": False}


@pytest.mark.parametrize(
    ("name", "world"),
    [("llama, 9 heads on 3", 1), ("llama, 9 heads on 3", 2), ("llama, 9 heads on 3", 3), ("deepseek_v3", 1),
     ("deepseek_v3", 2), ("gemma2", 3), ("gpt_oss", 1)],
)  # fmt: skip
def test_gradients_of_plain_transformers(pools: Any, name: str, world: int) -> None:
    """Uneven heads, MLA, windows with soft caps, sinks: blocks of a token, some, all, and more than there are."""
    packed = [(1, HOST), (7, {**HOST, "save_attention": False})]
    for documents, runs in ((PACKED, packed), (None, [(7, {}), (4, LESS), (LENGTH, {}), (64, HOST)])):
        arguments = (name, sample(documents), runs)
        results = pools(world)(exact, *arguments) if world > 1 else [exact(0, 1, *arguments)]
        for block, options, loss, error, where in (one for result in results for one in result):
            assert max(loss, error) < 1e-12, (block, options, loss, error, where)


# ----- engines


def engine_steps(rank: int, world: int, case: dict[str, Any]) -> list[Any]:
    """Three optimizer steps of two micro-batches, the first two block by block and the third whole, at a learning rate
    of 0: errors of loss and gradients against the plain run, and how many steps the engine has counted."""
    kind, accumulation = case["engine"], 2
    deep = kind.startswith("zero")
    ctx, divisor = alstlib.SPContext.create(case["sp"]), accumulation if deep else 1
    lengths = case.get("lengths", [32] * accumulation * ctx.dp)
    documents = 1 if "model" in case else 2  # plain hybrids carry the state from one document to the next
    samples = [varied(i, 1, n, documents) for i, n in enumerate(lengths)]
    samples[0]["labels"][:, : lengths[0] // 2 + 1] = -100  # the first rank has no valid token
    mine = [s for i, s in enumerate(samples) if i % ctx.dp == ctx.dp_rank]
    model = zoo.build_hybrid(case["model"], output_router_logits=False) if "model" in case else make_model("gqa")
    loss, want = plain_run(model, samples)
    alstlib.apply(model, ctx, alstlib.Options(**HOST))
    if deep:
        import deepspeed
        from deepspeed.utils import safe_get_full_grad

        operators.load()
        config = zero_config(int(kind[4:]), accumulation, 2_000)
        engine, *_ = deepspeed.initialize(model=model, config=config)
    else:
        engine = wrap(model, kind, world, None)  # type: ignore[arg-type]
    found: list[Any] = []
    for blocks in (True, True, False):
        logged = 0.0
        for i, batch in enumerate(SPDataLoader(mine, ctx, accumulation, replicated=True)):
            last = i == accumulation - 1
            with engine.no_sync() if kind == "ddp" and not last else contextlib.nullcontext():
                if blocks:
                    known = last if kind == "fsdp2" else None
                    out = alstlib.block_step(engine, batch, ctx, 8 // ctx.sp, divisor, last_micro_batch=known)
                else:
                    if kind == "fsdp2":
                        engine.set_requires_gradient_sync(last)
                    out = alstlib.causal_lm_loss(engine, batch, ctx, divisor)
                    engine.backward(out.loss) if deep else out.loss.backward()
            logged += float(out.mean) * int(out.tokens) / int(batch["step_tokens"])
            if deep and not last:
                engine.step()
        got = {}
        for name, p in model.named_parameters():
            grad: Any = safe_get_full_grad(p) if deep else p.grad
            got[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
        found.append(max(abs(logged / loss - 1), worst_error(got, want)[0]))
        engine.step() if deep else model.zero_grad()
    if deep:
        found.append((engine.global_steps, engine.micro_steps))
        engine.destroy()
    return found


LENGTHS = [32, 9, 17, 40]
"""Of the micro-batches of two replicas, in turn: they have 4 blocks and 2, then 3 and 5."""


@pytest.mark.parametrize(
    ("engine", "more"),
    [*((engine, {"sp": 2}) for engine in ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3")),
     *((engine, {"sp": 1, "lengths": LENGTHS}) for engine in ("fsdp2", "zero1", "zero2", "zero3")),
     *((engine, {"sp": 1, "lengths": LENGTHS, "model": model}) for engine, model in
       (("ddp", "lfm2"), ("fsdp2", "qwen3_next"), ("zero1", "kimi_linear"), ("zero3", "qwen3_5")))], ids=str,
)  # fmt: skip
def test_engines(ranks2: Any, engine: str, more: dict[str, Any]) -> None:
    """Each gradient is reduced once and added to that of the micro-batch before; the engine counts micro-batches. With
    replicas that have fewer blocks than others, by two and more, also of models with layers that carry a state."""
    for *errors, last in ranks2(engine_steps, {"engine": engine, **more}):
        if engine.startswith("zero"):
            assert last == (3, 6)
        else:
            errors.append(last)
        assert len(errors) == 3
        assert max(errors) < 1e-5, errors


# ----- one process


def batch_of(data: dict[str, Any]) -> dict[str, Tensor]:
    return shard_batch(data, 1, 0)


def whole_step(model: Any, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    out = alstlib.causal_lm_loss(model, batch)
    out.loss.backward()
    return out.mean.item(), gradients(model)


def blocks_step(model: Any, batch: dict[str, Tensor], block: int) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    out = alstlib.block_step(model, batch, block=block)
    return out.mean.item(), gradients(model)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "llama, dynamic NTK"])
def test_what_is_of_the_whole_sequence(name: str) -> None:
    """The routers' loss, with padding left out of it, and frequencies by the longest position; in evaluation too."""
    model, batch = zoo.build(name), batch_of(sample(rows=2, padding=9))
    with alstlib.apply(model):
        loss, want = whole_step(model, batch)
        got_loss, got = blocks_step(model, batch, 4)
        with torch.no_grad():
            model.zero_grad()
            alone = alstlib.block_step(model, batch, block=4)
    assert all(p.grad is None for p in model.parameters())
    assert max(abs(got_loss / loss - 1), abs(alone.mean.item() / loss - 1), worst_error(got, want)[0]) < 3e-6


def test_every_residence_gives_the_same_bits() -> None:
    model, batch, found = zoo.build("gemma2"), batch_of(sample(PACKED)), []
    for more in ({}, {"offload": "sync"}, HOST):
        with alstlib.apply(model, None, alstlib.Options(save_attention=True, **more)):
            found.append(blocks_step(model, batch, 4))
    for loss, got in found[1:]:
        assert loss == found[0][0]
        assert all(torch.equal(got[n], g) for n, g in found[0][1].items())


@pytest.mark.parametrize("save", [True, False])
def test_what_runs_how_often(save: bool) -> None:
    """Attention over the whole sequence: once in forward; in backward once in a block's first pass, and again in its
    recompute unless the output is kept."""
    model, batch = make_model("gqa"), batch_of(sample())
    with alstlib.apply(model, None, alstlib.Options(save_attention=save)) as handle:
        blocks_step(model, batch, 5)
        assert handle.attention.forward_calls == 2 * (2 if save else 3)


def test_dropout_is_replayed() -> None:
    model = make_model("gpt2", dtype=torch.float64, resid_pdrop=0.1, embd_pdrop=0.1)
    with alstlib.apply(model, None, alstlib.Options(tiled_mlp=4)):
        slope, numerical = slopes(model, batch_of(sample()), block=6)
    assert slope == pytest.approx(numerical, rel=1e-5)


def wide_states(**overrides: Any) -> Any:
    return zoo.build_hybrid("qwen3_5", linear_key_head_dim=64, linear_value_head_dim=64, **overrides)


@pytest.mark.slow
@pytest.mark.parametrize("build", [make_model, wide_states], ids=["attention", "states"])
def test_device_memory_does_not_grow(build: Any) -> None:
    """From 3 blocks to 9, with pages and states on the host: the peak grows by the tokens, positions and labels of a
    row."""

    def peak(blocks: int) -> tuple[int, int]:
        gc.collect()  # models of earlier tests, which would be freed in between
        model = build(max_position_embeddings=2048)
        batch = batch_of(make_samples(1, 64 * blocks)[0])
        with alstlib.apply(model, None, alstlib.Options(**HOST)) as handle, Ledger("cpu", [handle.store]) as ledger:
            ledger.mark_host(())
            ledger.start()
            start = ledger.device_bytes
            alstlib.block_step(model, batch, block=64)
            gc.collect()
            assert handle.store.nbytes == handle.store.unused
            return ledger.device_peak - start, handle.store.nbytes

    few, many = peak(3), peak(9)
    assert many[0] - few[0] < 0.02 * few[0] + 64 * 6 * 3 * 8, (few, many)
    assert many[1] > 2 * few[1]


@pytest.mark.parametrize("when", [1, 5, 8])
def test_a_failure_in_a_block_leaves_a_model_that_trains_on(when: int) -> None:
    """In forward, in backward's first block, and in its last: then block by block, whole, generation and detach."""
    model, batch, calls = make_model("gqa"), batch_of(sample()), 0
    want = plain_run(model, [sample()])[1]

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == when:
            raise RuntimeError("the device is on fire")

    mlp = model.model.layers[1].mlp
    with alstlib.apply(model, None, alstlib.Options(**HOST, tiled_mlp=False)) as handle:
        hook = mlp.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="on fire"):
            alstlib.block_step(model, batch, block=9)  # 3 blocks; each recompute runs the MLP twice
        hook.remove()
        gc.collect()
        assert (handle.call, handle.next_call, handle.store.leased) == (None, None, 0)
        assert handle.store.nbytes == handle.store.unused
        assert worst_error(blocks_step(model, batch, 9)[1], want)[0] < 1e-5
        assert worst_error(whole_step(model, batch)[1], want)[0] < 1e-5
        assert model.generate(batch["input_ids"][:, :3], max_new_tokens=2, do_sample=False).shape[1] == 5
    assert worst_error(plain_run(model, [sample()])[1], want)[0] < 1e-6


def test_an_optimizer_in_backward_steps_once() -> None:
    """Hooks that step and clear gradients as soon as these are made get whole gradients; without them, each block adds
    its part as before."""
    model, batch, calls = make_model("gqa"), batch_of(sample()), []
    gradient = plain_run(model, [sample()])[1]
    want = {n: p.detach() - 0.5 * gradient[n] for n, p in model.named_parameters()}

    def step(p: Tensor) -> None:
        calls.append(p)
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.5)  # type: ignore[arg-type]
        p.grad = None

    with alstlib.apply(model):
        hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        alstlib.block_step(model, batch, block=4)
        assert len(calls) == len(want)
        assert worst_error(dict(model.named_parameters()), want)[0] < 1e-5
        for hook in hooks:
            hook.remove()
        assert all(g.norm() > 0 for g in blocks_step(model, batch, 4)[1].values())
        assert len(calls) == len(want)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
        with pytest.raises(ValueError, match="_apply_optimizer_in_backward would step once for each block"):
            alstlib.block_step(model, batch, block=4)


def test_ligers_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes each block's loss. A missing package is named, and the model trains on. A CPU has no such kernel:
    plain formulas take its place."""
    model, batch, calls = make_model("gemma2"), batch_of(sample()), []

    class Fused:
        def __init__(
            self, *, ignore_index: int, reduction: str, softcap: float | None, accum_dtype: Any, label_smoothing: float
        ) -> None:
            self.how, self.cap = (
                {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing},
                softcap or 0.0,
            )

        def __call__(self, weight: Tensor, hidden: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
            calls.append((len(labels), torch.is_grad_enabled()))
            logits = self.cap * torch.tanh(nn.functional.linear(hidden, weight, bias) / self.cap)
            return nn.functional.cross_entropy(logits, labels, **self.how)  # type: ignore[arg-type]

    with alstlib.apply(model):
        loss, want = blocks_step(model, batch, 9)
    ours = tiled_loss.tiled_logits_loss

    def on_a_gpu(*args: Any, **how: Any) -> Tensor:
        return ours(*args, **{**how, "liger": True})

    with alstlib.apply(model, None, alstlib.Options(liger_loss=True)) as handle:
        assert handle.head is not None
        assert handle.head.liger
        monkeypatch.setattr(tiled_loss, "tiled_logits_loss", on_a_gpu)
        monkeypatch.setitem(sys.modules, "liger_kernel", None)
        with pytest.raises(ModuleNotFoundError, match="liger_kernel"):
            alstlib.block_step(model, batch, block=9)
        monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
        package = SimpleNamespace(LigerFusedLinearCrossEntropyLoss=Fused)
        monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
        got_loss, got = blocks_step(model, batch, 9)
    assert max(abs(got_loss / loss - 1), worst_error(got, want)[0]) < 1e-6
    assert calls == [(9, False), (9, False), (3, False), (3, True), (9, True), (9, True)]


# ----- refusals


def test_refusals() -> None:
    model, batch = make_model("gqa"), batch_of(sample())
    handle = alstlib.apply(model, None, alstlib.Options(chunk=6))
    with pytest.raises(ValueError, match=r"chunk=6, .* Options\(chunk=None\) and block=6"):
        alstlib.block_step(model, batch)
    handle.detach()
    with pytest.raises(ValueError, match="attach the model with"):
        alstlib.block_step(model, batch)
    with pytest.raises(ValueError, match="needs offload='async'"):
        alstlib.Options(kv="host")
    with alstlib.apply(model) as handle:
        for block in (0, 2.5, True):
            with pytest.raises(ValueError, match="must be an integer of at least 1 token"):
                alstlib.block_step(model, batch, block=block)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="the batch has no shift_labels"):
            alstlib.block_step(model, {k: v for k, v in batch.items() if k != "shift_labels"})
        handle.not_by_blocks = "layer 1 (Odd) calls attention more than once"
        with pytest.raises(ValueError, match=r"layer 1 \(Odd\) .*: the model cannot run by blocks; use causal_lm_loss"):
            alstlib.block_step(model, batch)


def limited(rank: int, world: int, memory: int, states: bool = False) -> tuple[str, int]:
    """What a step says, and the host memory it takes, where the last rank has so much of it."""
    ctx, model, message = alstlib.SPContext.create(world), wide_states() if states else make_model("gqa"), ""
    options = alstlib.Options(**HOST, host_memory=10**6 if rank == 0 else memory)
    with alstlib.apply(model, ctx, options) as handle:
        try:
            alstlib.block_step(model, shard_batch(sample(), world, rank), ctx, 4)
        except HostOutOfMemory as e:
            message = str(e)
        return message, handle.store.peak_nbytes


def test_a_host_without_room_is_refused_on_all_ranks_before_anything_is_taken(ranks2: Any) -> None:
    """In each of 2 layers 2 pages of 2 x 4 rows (the last is not kept) of one head's keys and values, of width 8 in
    fp32, with their sums; and the input of the first layer, from which the second's is made again."""
    least = 2 * 2 * 8 * (8 + 8) * (4 + 4) + 4 * 32 * 4
    (other, taken), (own, taken_too) = ranks2(limited, least - 1)
    assert "needs 1 bytes of host memory more than rank 1 has left" in other
    assert f"needs {least:,} bytes of host memory for this rank" in own
    assert taken == taken_too == 0
    (_, (message, taken)) = ranks2(limited, least)
    assert (message, taken) == ("", least)


def test_states_of_blocks_count_among_what_a_host_must_have_room_for(ranks2: Any) -> None:
    """They are known after the first block. They are most of what is taken, which differs by what is let go late."""
    (message, taken), _ = ranks2(limited, 10**6, True)
    assert (message, taken > 2 * 2 * 4 * 64 * 64) == ("", True)
    (other, _), (own, _) = ranks2(limited, taken * 3 // 4, True)
    assert "bytes of host memory more than rank 1 has left" in other
    assert "of host memory for this rank" in own


def static_graph(rank: int, world: int) -> str:
    model = make_model("gqa")
    ctx = alstlib.SPContext.create(world)
    alstlib.apply(model, ctx)
    engine = nn.parallel.DistributedDataParallel(model, static_graph=True)
    with pytest.raises(ValueError, match="call the micro-batches of the first step with causal_lm_loss"):
        alstlib.block_step(engine, shard_batch(sample(), world, rank), ctx, 4)
    return "refused"


def test_ddp_with_a_static_graph_learns_it_first(ranks2: Any) -> None:
    assert ranks2(static_graph) == ["refused"] * 2
