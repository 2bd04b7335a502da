"""What surrounds an attached model: half precision, autocast, compilation, generation, engines, adapters, and a
router's loss with padding, accumulation and replicas."""

import copy

import pytest
import torch
import zoo
from cases import (
    ALL_OFF,
    ALL_ON,
    attach,
    check_step,
    gradients,
    make_model,
    make_samples,
    plain_step,
    sample_of,
    step,
)
from operators import error_of
from torch import nn
from transformers.models.jamba.modeling_jamba import JambaPreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

import alstlib
from alstlib.reference import relative_error, shift

HOW = {"on": ALL_ON, "chunk": {**ALL_ON, "chunk": 5}, "off": ALL_OFF}
LENGTH = 26
SAMPLE = sample_of(LENGTH)
IDS = SAMPLE["input_ids"]


# ----- half precision


def errors(got, exact):
    """Root mean square of the relative errors of all gradients."""
    return float(torch.tensor([relative_error(got[n], exact[n]) ** 2 for n in exact]).mean().sqrt())


def half(rank, world, name, dtype, autocast, how):
    """Errors of loss and gradients against the fp32 oracle: ours, and plain transformers in the same precision."""
    data, weights, ctx = sample_of(60), zoo.build(name), alstlib.SPContext.create(world)
    weights.config.output_router_logits = False
    if not autocast:  # the same rounded weights in all three
        weights = weights.to(dtype)
    loss, exact = plain_step(copy.deepcopy(weights).float(), data)

    plain, model = copy.deepcopy(weights), copy.deepcopy(weights)
    with torch.autocast("cpu", dtype, enabled=autocast):
        logits = plain(input_ids=data["input_ids"], use_cache=False).logits
        theirs = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), data["input_ids"][:, 1:].flatten())
    theirs.backward()
    with torch.autocast("cpu", dtype, enabled=autocast), attach(model, ctx, **HOW[how]):
        mine = step(model, data, ctx)
    return {
        "gradient": errors(mine[1], exact), "plain gradient": errors(gradients(plain), exact),
        "loss": abs(mine[0] - loss) / loss, "plain loss": abs(theirs.item() - loss) / loss,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "autocast", "how"),
    [("llama", torch.float16, False, "on"), ("gpt_oss", torch.float16, True, "chunk"),
     ("llama", torch.bfloat16, True, "on"), ("llama", torch.bfloat16, False, "chunk"),
     ("mistral", torch.bfloat16, True, "chunk"), ("gemma2", torch.bfloat16, False, "on"),
     ("gpt_oss", torch.bfloat16, False, "on"), ("deepseek_v3", torch.bfloat16, True, "chunk")],
)  # fmt: skip
def test_half_precision_is_as_good_as_plain(pools, name, dtype, autocast, how):
    """As good as plain, on three ranks, which share rows of heads."""
    for result in pools(3)(half, name, dtype, autocast, how):
        assert result["gradient"] <= 1.5 * result["plain gradient"], result
        assert result["loss"] <= max(1.5 * result["plain loss"], 1e-3), result


# ----- generation


@pytest.mark.parametrize("how", ["on", "chunk"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mistral"])
def test_generation_inside_apply_is_plain_generation(name, how):
    """With padding on the left, a cache, and windows shorter than what is generated."""
    model = zoo.build(name).eval()
    ids = sample_of(9, rows=2)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 2}
    want = model.generate(**given)
    trained = plain_step(model, SAMPLE)
    with attach(model, **HOW[how]):
        assert torch.equal(model.generate(**given), want)
        check_step(step(model, SAMPLE), trained)  # and training goes on
        assert torch.equal(model.generate(**given), want)
    assert torch.equal(model.generate(**given), want)
    assert "generate" not in model.__dict__


def refused_generation(rank, world):
    with attach(make_model(), alstlib.SPContext.create(world)) as handle:
        return error_of(handle.model.generate, IDS)


def test_generation_over_ranks_is_refused(ranks2):
    assert set(ranks2(refused_generation)) == {
        "generate() needs the whole sequence on one rank: call it after detach(), or with sp=1"
    }


# ----- a router's loss


def balanced(model, samples):
    """Plain transformers: mean over all tokens, and the balance of each sample by its share of the tokens."""
    model = copy.deepcopy(model)
    shifted = [shift(s["labels"]) for s in samples]
    tokens = sum(int((y != -100).sum()) for y in shifted)
    total = 0.0
    for s, y in zip(samples, shifted):
        out = model(**{n: t for n, t in s.items() if n != "labels"}, use_cache=False)
        total = total + nn.functional.cross_entropy(out.logits.flatten(0, 1), y.flatten(), reduction="sum") / tokens
        total = total + model.config.router_aux_loss_coef * out.aux_loss * (y != -100).sum() / tokens
    total.backward()
    return total.item(), gradients(model)


def routed(rank, world, sp, accumulation, how, scale):
    """Padding on the right, several micro-batches, several replicas."""
    ctx = alstlib.SPContext.create(sp)
    model = zoo.build("mixtral")
    samples = make_samples(ctx.dp * accumulation, length=LENGTH, batch=2)
    for s in samples:
        mask = torch.ones_like(s["input_ids"])
        mask[1, 17:] = 0
        s["attention_mask"], s["labels"] = mask, s["labels"].masked_fill(mask == 0, -100)
    want, logged = balanced(model, samples), 0.0
    mine = samples[ctx.dp_rank :: ctx.dp]
    with attach(model, ctx, **HOW[how]):
        for batch in alstlib.SPDataLoader(mine, ctx, accumulation, replicated=True):
            out = alstlib.causal_lm_loss(model, batch)
            (out.loss * scale).backward()
            logged += out.mean.item() * int(out.tokens) / int(batch["step_tokens"])
    check_step((logged, {n: g / scale for n, g in gradients(model, world).items()}), want)


@pytest.mark.parametrize(
    ("world", "sp", "accumulation", "scale", "how"),
    [(2, 2, 1, 1.0, "off"), (2, 1, 2, 1.0, "chunk"), (3, 3, 2, 1024.0, "on"), (4, 2, 2, 1.0, "chunk")],
)
def test_router_loss(pools, world, sp, accumulation, scale, how):
    pools(world)(routed, sp, accumulation, how, scale)


def test_router_loss_is_in_the_output():
    model, data = zoo.build("mixtral"), SAMPLE
    want = model(**data, output_router_logits=True)
    with attach(model, **ALL_ON):
        got = model(**data)
        assert got.aux_loss.item() == pytest.approx(want.aux_loss.item(), rel=1e-6)
        assert got.loss.item() == pytest.approx(want.loss.item(), rel=1e-6)
        without = model(**data, output_router_logits=False)
        assert without.loss.item() < got.loss.item()
    model.config.output_router_logits = False
    assert without.loss.item() == pytest.approx(model(**data).loss.item(), rel=1e-6)


# ----- what is refused at a call


@pytest.mark.parametrize("how", ["on", "chunk"])
def test_layers_that_share_keys_are_refused_where_they_would_be_recomputed(how):
    model = zoo.small(
        "Gemma3nTextConfig", num_kv_shared_layers=2, num_hidden_layers=4, sliding_window=64, head_dim=8,
        layer_types=zoo.LAYER_TYPES * 2, hidden_size_per_layer_input=8, laurel_rank=4, altup_num_inputs=2,
        vocab_size_per_layer_input=zoo.VOCAB, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"layer 2 .* shares state with other layers|takes no cache"):
        attach(model, **HOW[how])
    want = plain_step(model, SAMPLE)
    with attach(model, **ALL_OFF):
        check_step(step(model, SAMPLE), want)


def test_a_router_loss_that_is_not_known_is_refused():
    model = zoo.small("JetMoeConfig", num_hidden_layers=1, kv_channels=8, num_local_experts=4, num_experts_per_tok=2)
    with attach(model):
        said = error_of(model, **SAMPLE, output_router_logits=True)
    assert "output_router_logits=True: the router's loss of JetMoe" in said


class Router(nn.Module):
    """Jamba's, around a projection."""

    def __init__(self, inner):
        super().__init__()
        self.projection, self.top_k = nn.Linear(*reversed(inner.weight.shape), bias=False), inner.top_k
        self.projection.weight = inner.weight

    def forward(self, x):
        logits = self.projection(x)
        weights, chosen = logits.softmax(-1).topk(self.top_k, -1)
        return logits, weights, chosen


def test_a_router_may_be_one_projection_among_others(monkeypatch):
    """Jamba's was, before transformers 5.21: its class alone does not say it, and only logits come out."""
    model = zoo.build_hybrid("jamba", torch.float32, output_router_logits=True)
    loss, grads = plain_step(model, SAMPLE)
    want = loss, {name.replace("router.weight", "router.projection.weight"): g for name, g in grads.items()}
    for block in [m for m in model.modules() if type(m).__name__ == "JambaSparseMoeBlock"]:
        block.router = Router(block.router)
    recorded = {
        **type(model)._can_record_outputs,
        "router_logits": OutputRecorder(nn.Linear, layer_name="router.projection"),
    }
    monkeypatch.setattr(JambaPreTrainedModel, "_can_record_outputs", recorded)
    with attach(model, **ALL_ON) as handle:
        assert {type(m) for m in handle.facts.routers} == {nn.Linear}
        check_step(step(model, SAMPLE), want)


@pytest.mark.parametrize("name", ["cpu", "blockwise"])
def test_kernels_sum_in_full_precision_under_autocast(name):
    from alstlib.kernels.attention import attention_forward
    from alstlib.kernels.backends import BACKENDS
    from alstlib.kernels.rule import Rule

    q, k, v = (torch.randn(1, n, 64, 8, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (4, 2, 2))
    rule = Rule(1.0, softcap=30.0 if name == "blockwise" else None)
    plain = attention_forward(BACKENDS[name], q, k, v, rule=rule)
    with torch.autocast("cpu", torch.bfloat16):
        under = attention_forward(BACKENDS[name], q, k, v, rule=rule)
    assert all(torch.equal(a, b) for a, b in zip(plain, under))


# ----- evaluation, dropout


def dropout_notes(rank, world):
    model = make_model("gpt2", resid_pdrop=0.1)
    with attach(model, alstlib.SPContext.create(world), **ALL_OFF) as handle:
        return handle.notes


def test_dropout_on_ranks_is_said(ranks2):
    for notes in ranks2(dropout_notes):
        assert any("seed each rank with seed + rank" in note for note in notes)
    with attach(make_model("gpt2", resid_pdrop=0.1), **ALL_OFF) as handle:
        assert handle.notes == []
