"""The gradient contract: under every engine, each gradient is that of the unsharded run's mean over valid tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import zoo
from cases import VOCAB, make_model, make_samples, plain_run, worst_error
from matrix import decoder_layers, engine_of, zero_config
from torch import Tensor, nn

import alstlib
from alstlib.data.loader import SPDataLoader
from alstlib.measure import verify

TOLERANCE = 1e-5
ALL_ON = {
    "tiled_mlp": 5,
    "tiled_norm": 6,
    "tiled_loss": 7,
    "checkpoint": True,
    "offload": "async",
    "save_attention": True,
}
ALL_OFF = {"tiled_mlp": False, "tiled_norm": False, "tiled_loss": False, "checkpoint": False}


def varied(seed: int, rows: int, length: int, documents: int) -> dict[str, Tensor]:
    """A sample of so many rows, tokens of a row, and packed documents of a row."""
    ids = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    at = torch.arange(length)
    starts = torch.linspace(0, length, documents + 1)[:-1].long()
    first = starts[torch.searchsorted(starts, at, right=True) - 1]
    return {"input_ids": ids, "labels": ids.masked_fill(at == first, -100), "position_ids": (at - first).expand_as(ids)}


def run_case(rank: int, world: int, case: dict[str, Any]) -> dict[str, Any]:
    """One optimizer step's gradients on this rank's shards, against the plain run; returns the worst error."""
    engine_kind, accumulation = case.get("engine", "average"), case.get("accumulation", 1)
    scale, batch_size = case.get("scale", 1.0), case.get("batch", 1)
    ctx = alstlib.SPContext.create(case["sp"])
    build = zoo.build_hybrid if case.get("model") in {**zoo.HYBRIDS, **zoo.MORE_HYBRIDS} else make_model
    model = build(case.get("model", "gqa"), **case.get("overrides", {}))
    for twin in case.get("shared", ()):  # a module, or a weight of one, that the second layer has from the first
        here, _, attribute = twin.rpartition(".")
        first, second = (layer.get_submodule(here) for layer in decoder_layers(model)[:2])
        setattr(second, attribute, getattr(first, attribute))
    for name, p in model.named_parameters():
        if any(part in name for part in case.get("frozen", ())):
            p.requires_grad_(False)
    samples = make_samples(ctx.dp * accumulation, length=case.get("length", 32), batch=batch_size)
    if "shapes" in case:
        samples = [varied(i, *shape) for i, shape in enumerate(itertools.chain(*zip(*case["shapes"])))]
    if "documents" in case:
        samples = [{**s, "document_lengths": [case["documents"]]} for s in samples]
    if case.get("empty"):
        samples[0]["labels"][:, : samples[0]["labels"].shape[1] // 2 + 1] = -100  # the first rank has no valid token
    if getattr(model.config, "output_router_logits", False):  # their loss is that of one sample
        loss, want = verify.plain(model, *samples)
    else:
        loss, want = plain_run(model, samples, scale)
    forwards = [0] * len(list(decoder_layers(model)))
    for i, layer in enumerate(decoder_layers(model)):

        def count(module: Any, args: Any, out: Tensor, i: int = i) -> None:
            forwards[i] += out.shape[1]

        if hasattr(layer, "mlp"):
            layer.mlp.register_forward_hook(count)
    options = case.get("options", {})
    if "host_memory" in case:
        options = {**options, "host_memory": case["host_memory"][rank]}
    handle = alstlib.apply(model, ctx, alstlib.Options(**options))
    engine = engine_of(model, engine_kind, accumulation, case.get("bucket", 100_000))
    deep = engine_kind.startswith("zero")
    mine = [s for i, s in enumerate(samples) if i % ctx.dp == ctx.dp_rank]
    loader = SPDataLoader(mine, ctx, accumulation, replicated=True, pad_to=case.get("pad_to"))
    logged = 0.0
    for i, batch in enumerate(loader):
        if engine_kind == "fsdp2":
            engine.set_requires_gradient_sync(i == accumulation - 1)
        sync = engine.no_sync() if engine_kind == "ddp" and i < accumulation - 1 else torch.enable_grad()
        with sync:
            out = alstlib.causal_lm_loss(engine, batch, ctx, engine_divides_by=accumulation if deep else 1)
            logged += float(out.mean) * int(out.tokens) / int(batch["step_tokens"])
            if deep:
                engine.backward(out.loss * scale)
                if i < accumulation - 1:
                    engine.step()
            else:
                (out.loss * scale).backward()
    if engine_kind == "average":
        for p in model.parameters():
            if p.grad is not None:
                torch.distributed.all_reduce(p.grad)
                p.grad /= world
    got: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if deep:
            from deepspeed.utils import safe_get_full_grad

            grad = safe_get_full_grad(p) if p.requires_grad else None
        else:
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        if grad is not None and p.requires_grad:
            got[name] = grad.clone()
    want = {n: g for n, g in want.items() if dict(model.named_parameters())[n].requires_grad}
    error, name = worst_error(got, want)
    if deep:
        engine.step()
        engine.destroy()
    rows = sum(s["input_ids"].shape[1] for s in mine) / ctx.sp
    return {"loss": abs(logged - loss) / loss, "grad": error, "name": name, "kept": handle.attention_kept,
            "every": handle.inputs_kept_every, "mlp": [n / rows for n in forwards]}  # fmt: skip


def check(pool: Any, case: dict[str, Any]) -> list[dict[str, Any]]:
    results = pool(run_case, case)
    for rank, result in enumerate(results):
        assert result["loss"] < 1e-6, (rank, result)
        assert result["grad"] < TOLERANCE, (rank, result)
    return results


@pytest.mark.parametrize("options", [ALL_OFF, ALL_ON], ids=["all off", "all on"])
@pytest.mark.parametrize("model", ["mha", "gqa", "mqa", "qwen3", "gpt2", "gemma2"])
def test_models_sp2(ranks2: Any, model: str, options: dict[str, Any]) -> None:
    check(ranks2, {"sp": 2, "model": model, "options": options})


@pytest.mark.parametrize(
    "feature",
    [
        {"tiled_mlp": True}, {"tiled_mlp": 3}, {"tiled_loss": True}, {"tiled_loss": 3}, {"checkpoint": True},
        {"checkpoint": True, "save_attention": True}, {"checkpoint": True, "offload": "sync"},
        {"checkpoint": True, "offload": "async", "save_attention": "auto"}, {"attention": "eager"},
    ],
    ids=str,
)  # fmt: skip
def test_each_feature_alone_sp2(ranks2: Any, feature: dict[str, Any]) -> None:
    check(ranks2, {"sp": 2, "options": {**ALL_OFF, **feature}})


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("options", [ALL_OFF, ALL_ON], ids=["all off", "all on"])
def test_engines_sp2(ranks2: Any, engine: str, options: dict[str, Any]) -> None:
    """Unequal valid tokens in two accumulation steps, a scaled loss, and a rank without a valid token."""
    check(ranks2, {"sp": 2, "engine": engine, "accumulation": 2, "scale": 0.25, "empty": True, "options": options})


@pytest.mark.parametrize("engine", ["ddp", "zero3"])
@pytest.mark.parametrize("model", zoo.HYBRIDS)
def test_layers_with_a_state_under_engines(ranks2: Any, model: str, engine: str) -> None:
    """Their mixers read weights (of the convolution, of the decay) outside the module that holds them."""
    case = {"sp": 2, "model": model, "engine": engine, "accumulation": 2, "length": 33}
    check(ranks2, {**case, "options": {**ALL_ON, "states": "pass"}, "overrides": {"output_router_logits": False}})


@pytest.mark.parametrize("engine", ["ddp", "zero3"])
@pytest.mark.parametrize("model", zoo.HYBRIDS)
def test_packed_layers_with_a_state_in_chunks_under_engines(ranks2: Any, model: str, engine: str) -> None:
    """With the load-balancing loss where the model has one."""
    case = {"sp": 2, "model": model, "engine": engine, "length": 33, "documents": [3, 17, 1, 12]}
    check(ranks2, {**case, "options": {**ALL_ON, "chunk": 5, "states": "pass"}})


@pytest.mark.parametrize("model", ["zamba", "mamba"])
def test_more_layers_with_a_state_under_zero3(ranks2: Any, model: str) -> None:
    check(ranks2, {"sp": 2, "model": model, "engine": "zero3", "accumulation": 2, "length": 33, "options": ALL_ON})


@pytest.mark.parametrize(
    "model, engine, states",
    [("qwen3_5", "fsdp2", "pass"), ("qwen3_5", "fsdp2", "heads"), ("falcon_h1", "zero3", "heads")],
)
def test_layers_with_a_state_by_both_ways(ranks2: Any, model: str, engine: str, states: str) -> None:
    """By heads, each rank has gradients of weights of its own heads only (of decays, of skips)."""
    options = {**ALL_ON, "states": states}
    check(ranks2, {"sp": 2, "model": model, "engine": engine, "accumulation": 2, "options": options})


@pytest.mark.parametrize("sp", [1, 2, 4])
@pytest.mark.parametrize("model", ["qwen3_5", "falcon_h1"])
def test_layers_with_a_state_on_four_ranks(ranks4: Any, model: str, sp: int) -> None:
    """Two key heads on four ranks: states know of no division of heads, and heads share them."""
    options = {**ALL_ON, "states": "pass" if model == "qwen3_5" else "heads"}
    check(ranks4, {"sp": sp, "model": model, "accumulation": 2, "empty": True, "length": 37, "options": options})


@pytest.mark.parametrize("model", ["qwen3_next", "bamba", "falcon_h1", "nemotron_h", "lfm2", "lfm2_moe"])
def test_layers_with_a_state_where_heads_do_not_divide(ranks4: Any, model: str) -> None:
    """Three heads on four ranks, in attention and, where the model has as many there, in the state."""
    heads = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    case = {"sp": 4, "model": model, "overrides": heads, "length": 37, "documents": [3, 21, 1, 12]}
    check(ranks4, {**case, "options": {**ALL_ON, "chunk": 5}})


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("engine", ["fsdp2", "zero0", "zero2", "zero3"])
@pytest.mark.parametrize("model", ["gqa", "gemma2"])
def test_engines_run_the_mlp_twice(ranks2: Any, model: str, engine: str, sp: int) -> None:
    """With their hooks in the graph too, and where a norm follows the MLP: its weight is then used in the MLP's tiles.
    Four micro-batches: by then ZeRO-3 prefetches in the order that it has recorded."""
    case = {"sp": sp, "model": model, "engine": engine, "options": ALL_ON, "accumulation": 4}
    for result in check(ranks2, case):
        assert result["mlp"] == [2, 2], result


@pytest.mark.parametrize("frozen", [[], ["mlp"]], ids=str)
@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero0", "zero2", "zero3"])
def test_engines_with_the_inputs_of_some_layers(ranks2: Any, engine: str, save: bool, frozen: list[str]) -> None:
    """A layer that runs in another layer's backward finds its weights gathered."""
    inputs, outputs = 2 * 16 * 32 * 4, 5 * 16 * 4 * (8 * 4 + 4)
    options = {**ALL_ON, "save_attention": save, "host_memory": inputs + outputs * save}
    case = {"sp": 2, "engine": engine, "options": options, "overrides": {"num_hidden_layers": 5}, "accumulation": 4}
    for result in check(ranks2, {**case, "frozen": frozen}):
        assert result["every"] == 3


# micro-batches of each replica: (rows, tokens of a row, documents of a row)
SHAPES = [
    [(1, 1, 1), (2, 30, 3), (1, 64, 1), (1, 5, 2), (3, 17, 1)],
    [(1, 48, 5), (1, 7, 1), (2, 2, 1), (3, 40, 7), (1, 96, 2)],
]  # fmt: skip
ROOM = {
    "plenty": [None, None], "both short": [9_000, 20_000], "second short": [200_000, 16_000],
    "one limited": [25_000, None],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("memory", ROOM.values(), ids=ROOM)
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_replicas_in_which_all_that_is_local_differs(ranks2: Any, engine: str, memory: list[Any]) -> None:
    """Rows, lengths, documents and room on the host, from replica to replica and from micro-batch to micro-batch: the
    engine gathers weights, so all replicas must run the same layers in the same order."""
    case = {"sp": 1, "model": "gemma2", "engine": engine, "accumulation": 5, "shapes": SHAPES}
    case["options"] = {**ALL_ON, "save_attention": "auto"}
    case |= {"host_memory": memory, "overrides": {"num_hidden_layers": 5}}
    kept = [(r["every"], r["kept"]) for r in check(ranks2, case)]
    assert kept[0] == kept[1]
    assert kept[0][0] > 1 or memory == [None, None]


@pytest.mark.slow
def test_groups_in_which_all_that_is_local_differs(ranks4: Any) -> None:
    """The same with two ranks in each replica; the first has one token a rank in its first sample."""
    shapes = [[(1, 2, 1), (1, 61, 3), (2, 9, 1)], [(1, 48, 5), (3, 7, 1), (1, 96, 2)]]
    case = {"sp": 2, "model": "gemma2", "engine": "zero3", "accumulation": 3, "shapes": shapes}
    case |= {"options": {**ALL_ON, "save_attention": "auto"}, "host_memory": [10**6, 10_000, 10**6, 10**6]}
    kept = {(r["every"], r["kept"]) for r in check(ranks4, {**case, "overrides": {"num_hidden_layers": 5}})}
    assert len(kept) == 1


@pytest.mark.parametrize(
    "model, options, pad_to", [("gqa", ALL_ON, None), ("gqa", {"chunk": 1}, 6), ("qwen3_next", ALL_ON, 9)], ids=str
)
def test_samples_of_fewer_tokens_than_ranks(pools: Any, model: str, options: dict[str, Any], pad_to: int) -> None:
    """Some ranks have nothing but padding: in a step of samples of 1, 2 and 5 tokens."""
    case = {"sp": 3, "model": model, "accumulation": 4, "shapes": [[(1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 5, 1)]]}
    overrides = {"output_router_logits": False} if model == "qwen3_next" else {}
    check(pools(3), {**case, "options": options, "pad_to": pad_to, "overrides": overrides})


@pytest.mark.parametrize("model", ["mha", "gqa", "mqa"])
@pytest.mark.parametrize("sp", [2, 4])
def test_four_ranks(ranks4: Any, sp: int, model: str) -> None:
    check(ranks4, {"sp": sp, "model": model, "accumulation": 2, "empty": True, "options": ALL_ON})


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3"])
def test_engines_sp2_dp2(ranks4: Any, engine: str) -> None:
    check(ranks4, {"sp": 2, "engine": engine, "accumulation": 2, "scale": 0.25, "options": ALL_ON})


@pytest.mark.parametrize("engine", ["average", "zero3"])
def test_batch_of_two_and_an_odd_length(ranks2: Any, engine: str) -> None:
    check(ranks2, {"sp": 2, "engine": engine, "batch": 2, "length": 31, "options": ALL_ON})


@pytest.mark.parametrize("engine", ["average", "ddp", "zero1", "zero3"])
@pytest.mark.parametrize(
    "frozen", [["model."], ["lm_head"], ["embed"], ["mlp"], ["embed", "head", "attn", "norm"]], ids=str
)
def test_frozen_parts(ranks2: Any, engine: str, frozen: list[str]) -> None:
    """In the last case the MLPs alone train, whose weights ZeRO-3 gathers and reduces with them."""
    check(ranks2, {"sp": 2, "engine": engine, "frozen": frozen, "options": ALL_ON})


@pytest.mark.parametrize("bucket", [1, 2_000, 100_000])
@pytest.mark.parametrize("engine", ["average", "ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3"])
def test_tied_embeddings(ranks2: Any, engine: str, bucket: int) -> None:
    """The embedding, 3,072 elements, is above DeepSpeed's thresholds or below: a bucket that is not full is not sent
    before backward ends, and hides what arrives too late."""
    case = {"sp": 2, "engine": engine, "overrides": {"tie_word_embeddings": True}, "accumulation": 2}
    check(ranks2, {**case, "bucket": bucket, "options": ALL_ON})


STREAMED = {**ALL_ON, "chunk": 5}


def static_graph_steps(rank: int, world: int, options: dict[str, Any]) -> tuple[str, list[float]]:
    """Steps of two micro-batches under DDP with a static graph: what the first says with no_sync(), then errors."""
    ctx, model, samples = alstlib.SPContext.create(2), make_model(), make_samples(2)
    _, want = plain_run(model, samples)
    alstlib.apply(model, ctx, alstlib.Options(**options))
    engine = nn.parallel.DistributedDataParallel(model, static_graph=True)
    refused, errors = "", []
    for step in range(4):
        model.zero_grad()
        for i, batch in enumerate(SPDataLoader(samples, ctx, 2, replicated=True)):
            with engine.no_sync() if step != 1 and i == 0 else torch.enable_grad():
                try:
                    alstlib.causal_lm_loss(engine, batch, ctx).loss.backward()
                except ValueError as e:
                    refused = str(e)
                    break
        if step:
            errors.append(worst_error({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, want)[0])
    return refused, errors


@pytest.mark.parametrize("options", [ALL_OFF, ALL_ON, STREAMED], ids=["all off", "all on", "streamed"])
def test_ddp_with_a_static_graph(ranks2: Any, options: dict[str, Any]) -> None:
    for refused, errors in ranks2(static_graph_steps, options):
        assert "has to reduce its first backward" in refused
        assert max(errors) < TOLERANCE


def refusal(rank: int, world: int, case: dict[str, Any]) -> str:
    try:
        return f"ran: {run_case(rank, world, case)}"
    except ValueError as e:
        return str(e)


@pytest.mark.parametrize("options", [ALL_ON, STREAMED], ids=["all on", "streamed"])
@pytest.mark.parametrize("shared", ["mlp", "input_layernorm.weight"])
@pytest.mark.parametrize("engine", ["zero1", "zero3"])
def test_weights_that_layers_share(ranks2: Any, engine: str, shared: str, options: dict[str, Any]) -> None:
    """Each layer's recompute has a gradient of its own for them, of which ZeRO-3 keeps one."""
    case = {"sp": 2, "engine": engine, "shared": [shared], "options": options, "bucket": 1}
    if engine == "zero3":
        for reason in ranks2(refusal, case):
            assert f"layers.0.{shared}" in reason
            assert "trains and is used in several parts" in reason
        case["frozen"] = ["mlp", "input_layernorm"]
    check(ranks2, case)


def sharded_zamba2(rank: int, world: int) -> str:
    """What `apply` says to weights that DeepSpeed has sharded already; it takes them once they are frozen."""
    import deepspeed

    model = zoo.build_hybrid("zamba2")
    deepspeed.zero.Init(module=model, config_dict_or_path=zero_config(3, 1, 1_000))
    with pytest.raises(ValueError, match="trains and is used in several parts") as refused:
        alstlib.apply(model, alstlib.SPContext.create(2))
    alstlib.apply(model.requires_grad_(False), alstlib.SPContext.create(2)).detach()
    return str(refused.value)


def test_layers_that_share_weights_are_refused_when_attached_under_zero3(ranks2: Any) -> None:
    for message in ranks2(sharded_zamba2):
        assert "ZeRO-3 keeps the gradient of one of them: use zero_stage 0 or 1, or freeze it" in message


@pytest.mark.parametrize("save", [False, True], ids=["attention twice", "attention once"])
@pytest.mark.parametrize("model", ["mha", "gqa", "mqa", "qwen3", "gpt2", "gemma2"])
def test_streamed_layers_sp2(ranks2: Any, model: str, save: bool) -> None:
    check(ranks2, {"sp": 2, "model": model, "options": {**STREAMED, "save_attention": save}})


@pytest.mark.parametrize("options", [{"chunk": 4}, {"chunk": 16}, {"chunk": 1}, {"chunk": 100}], ids=str)
@pytest.mark.parametrize("offload", ["none", "sync"])
def test_streamed_layers_of_any_chunk(ranks2: Any, options: dict[str, Any], offload: str) -> None:
    """Chunks that divide, do not divide, of one row, and longer than the sequence; all else off or as it is."""
    check(ranks2, {"sp": 2, "batch": 2, "length": 30, "options": {**ALL_OFF, "checkpoint": True, "offload": offload,
                                                                  "save_attention": True, **options}})  # fmt: skip


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3"])
def test_streamed_layers_under_engines(ranks2: Any, engine: str) -> None:
    case = {"sp": 2, "engine": engine, "accumulation": 2, "scale": 0.25, "empty": True, "options": STREAMED}
    check(ranks2, case)


@pytest.mark.parametrize("sp", [1, 2, 4])
def test_streamed_layers_on_four_ranks(ranks4: Any, sp: int) -> None:
    """With sp 4 and two key/value heads, ranks share one; with sp 1 each rank has its own sample."""
    check(ranks4, {"sp": sp, "model": "gqa", "accumulation": 2, "empty": True, "length": 36, "options": STREAMED})


@pytest.mark.parametrize("engine", ["average", "ddp", "zero3"])
@pytest.mark.parametrize("frozen", [["model."], ["embed"], ["mlp"], ["norm", "embed"]], ids=str)
def test_streamed_layers_with_frozen_parts(ranks2: Any, engine: str, frozen: list[str]) -> None:
    check(ranks2, {"sp": 2, "engine": engine, "frozen": frozen, "options": STREAMED})
