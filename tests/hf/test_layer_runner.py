"""What layers keep on a host with little room: by rule, reported, exact, and its cost counted."""

import logging

import pytest
import torch
import yaml
import zoo
from cases import (
    ALL_OFF,
    attach,
    batch_of,
    check_attached,
    check_refused,
    check_step,
    gradients,
    make_model,
    passes,
    plain_step,
    same,
    step,
    with_lora,
    worst_error,
)
from torch import nn

import alstlib
from alstlib.base.sizing import Forward
from alstlib.offload.host_store import HostOutOfMemory

LENGTH, WIDTH, HEADS, LAYERS = 64, 32, 4, 5
INPUT = LENGTH * WIDTH * 4
OUTPUT = LENGTH * HEADS * (WIDTH // HEADS * 4 + 4)
TILES = {"tiles": {"mlp": 16, "loss": 16, "norm": True}}
EVERY = {1: 5, 2: 3, 3: 2, 5: 1}  # inputs kept of 5 layers


def batch(seed=0, length=LENGTH):
    return batch_of(length, seed)


def model_of(kind="gqa", **overrides):
    return make_model(kind, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": LAYERS}, **overrides)


def train(model, seed=0):
    return step(model, batch(seed), seed=7)


def loss(model, seed=0, length=LENGTH):
    return alstlib.causal_lm_loss(model, batch(seed, length)).loss


def with_room(model, memory, save=False, mode="sync", **more):
    return attach(model, **TILES, offload=mode, save_attention=save, host_memory=memory, **more)


def budget_for(every, outputs=0):
    return EVERY[every] * INPUT + outputs * OUTPUT


# ----- the rule


@pytest.mark.parametrize("save", [True, False, "auto"])
def test_the_rule(save):
    """Against every choice there is: the smallest k that fits, and with `auto` the outputs that fit beside it."""
    for layers, attending in ((1, 1), (2, 2), (5, 5), (7, 7), (7, 2), (3, 0)):
        rule = Forward(layers=layers, attending=range(attending), save=save, input_bytes=10, outputs=(2, 1))
        for room in range(0, layers * 13 + 3):
            outputs = attending if save is True else 0
            left = {k: room - -(-layers // k) * 10 - outputs * 3 for k in range(1, layers + 1)}
            every = next((k for k in left if left[k] >= 0), layers)
            if save == "auto":
                outputs = min(attending, max(0, left[every]) // 3)
            assert rule.kept(room)[:2] == (every, outputs)


# ----- through a model


@pytest.mark.parametrize("save", [True, "auto"])
@pytest.mark.parametrize("chunk", [None, 24])
def test_room_is_taken_for_the_outputs_of_layers_that_attend(save, chunk):
    """Of a hybrid, whose other layers have none: with room for one output, that of its second layer is kept."""
    memory = 2 * INPUT + OUTPUT
    with with_room(zoo.build_hybrid("qwen3_5"), memory, save, chunk=chunk, on_host="none") as handle:
        loss(handle.model).backward()
        assert [handle.plan.keeps_attention(i) for i in range(2)] == [False, True]
        assert (handle.plan.attention_kept, handle.store.peak_nbytes) == (1.0, memory)


@pytest.mark.parametrize(
    "kind, save, mode", [("gqa", True, "sync"), ("qwen3", False, True), ("gpt2", "auto", "sync"), ("gqa", "auto", True)]
)
@pytest.mark.parametrize("every", EVERY)
def test_inputs_of_some_layers(monkeypatch, every, kind, save, mode):
    """Exact; the host holds the plan's bytes and no more; attention runs once where its output is kept and twice where
    not, MLPs and projections twice, and three times where their layer's input is made again for another layer."""
    kept = {True: LAYERS, False: 0, "auto": {1: 3, 2: 1}.get(every, 0)}[save]
    model, memory = model_of(kind), budget_for(every, kept)
    want = plain_step(model, batch())
    found = passes(monkeypatch, model)
    with with_room(model, memory, save, mode) as handle:
        for _ in range(3):
            for counts in found.values():
                counts[:] = [0] * LAYERS
            check_step(train(model), want)
            assert (handle.plan.inputs_kept_every, handle.plan.attention_kept) == (every, kept / LAYERS)
            assert handle.store.nbytes == handle.store.peak_nbytes == memory
    last = [(n + 1) % every == 0 or n == LAYERS - 1 for n in range(LAYERS)]
    assert found["mlp"] == found["query"] == [LENGTH * (2 if alone else 3) for alone in last]
    assert found["attention"] == [LENGTH * (1 if n < kept else 2) for n in range(LAYERS)]


def test_it_is_said_once_whatever_the_lengths(caplog):
    model = model_of()
    with caplog.at_level(logging.WARNING, "alstlib"), with_room(model, budget_for(2)) as handle:
        for length in (64, 64, 30, 63, 29, 64):
            loss(model, length=length).backward()
    (note,) = handle.notes
    assert [r.message for r in caplog.records if r.name == "alstlib.hf.memory_plan"] == [note]
    assert "inputs of all 5 layers: one in 2 is kept; backward runs one more forward" in note
    assert f"holds up to 2 ({2 * INPUT:,} bytes) on the device" in note


def test_two_forwards_before_their_backwards():
    """The second finds less room and keeps fewer inputs; evaluation in between keeps nothing."""
    model = model_of()
    with attach(model, **TILES):
        one, two = (train(model, seed)[1] for seed in (0, 1))
    with with_room(model, 7 * INPUT) as handle:
        for first in (0, 1):
            model.zero_grad()
            losses = []
            for every in (1, 3):
                losses.append(loss(model, len(losses)))
                assert handle.plan.inputs_kept_every == every
                evaluate(model)
            assert handle.store.nbytes == 7 * INPUT
            losses.pop(first).backward()
            losses.pop().backward()
            assert worst_error(gradients(model), {n: one[n] + two[n] for n in one})[0] < 1e-5
            assert handle.store.leased == 0


PASSES = yaml.safe_load("""
tiles: {tiles: &tiles {mlp: 16, loss: 16, norm: true}, checkpoint: false}
layers: {save_attention: true}
layers in tiles: {tiles: *tiles}
inputs of some: {tiles: *tiles, offload: sync, save_attention: false, host_memory: 8192}
chunks: {chunk: 20}
chunks in tiles: {tiles: *tiles, chunk: 20}
""")


def adapted():
    """GPT-NeoX with dropout after its MLP, and adapters that drop in front of it and inside."""
    return with_lora(zoo.build("gpt_neox", hidden_dropout=0.3), ["dense", "dense_4h_to_h"], lora_dropout=0.3).train()


def evaluate(model):
    with torch.no_grad():
        model(input_ids=batch(5)["input_ids"])


def evaluate_only(wrapped):
    evaluate(wrapped.eval())


def evaluate_and_go_on(wrapped):
    evaluate(wrapped.eval())
    wrapped.train()


def ask_the_reference(wrapped):
    """As DPO does: the model without its adapter, in training mode."""
    with wrapped.disable_adapter():
        evaluate(wrapped)


@pytest.mark.parametrize("between", [evaluate_only, evaluate_and_go_on, ask_the_reference])
@pytest.mark.parametrize("how", PASSES)
def test_a_forward_between_a_forward_and_its_backward(how, between):
    """What a pass draws, and in which mode it runs, belongs to the pass: gradients are the same, bit for bit. A mode
    that was switched meanwhile stays."""
    wrapped = adapted()
    with attach(wrapped.get_base_model(), **PASSES[how]):
        train(wrapped)  # layers are known from their first pass
        want = train(wrapped)[1]
        wrapped.zero_grad()
        torch.manual_seed(7)
        made = loss(wrapped)
        between(wrapped)
        made.backward()
        assert same(gradients(wrapped), want)
        assert {m.training for m in wrapped.modules()} == {between is not evaluate_only}


@pytest.mark.parametrize("change", [lambda out: out * 1.5, lambda out: out.mul_(1.5)], ids=["new tensor", "in place"])
def test_layers_with_something_in_between(change):
    """A layer whose input is not what the layer before it returned keeps its own."""
    model, memory = model_of(), 4 * INPUT
    for i in (0, 3):
        model.model.layers[i].register_forward_hook(lambda module, args, out: change(out))
    handle = check_attached(model, batch(), 2, **TILES, offload="sync", save_attention=False, host_memory=memory)
    assert handle.plan.inputs_kept_every == 2
    assert handle.store.peak_nbytes == memory  # layers 0, 1 and 2, 3, 4: one more than the 3 of an unbroken chain


def test_backward_of_a_part_of_the_layers():
    """A loss on an inner layer's output; what is after it keeps its place until the graph goes."""
    model, ids = model_of(), batch()["input_ids"]

    def inner():
        out = model(input_ids=ids, labels=ids, output_hidden_states=True)
        out.hidden_states[2].square().sum().backward()
        return out.loss, gradients(model)

    _, want = inner()
    model.zero_grad()
    with with_room(model, budget_for(5)):
        made, got = inner()
        assert worst_error(got, want)[0] < 1e-5
        with pytest.raises(RuntimeError, match="backward ran a second time"):
            made.backward()


# ----- gradients of chosen tensors, and of the second order

HOW = {"nothing": ALL_OFF, **PASSES}
CHOSEN = """
model.embed_tokens.weight
model.layers.0.mlp.up_proj.weight
lm_head.weight
model.layers.4.self_attn.q_proj.weight model.norm.weight
"""


@pytest.mark.parametrize("how", HOW)
def test_gradients_of_chosen_weights(how):
    """By torch.autograd.grad and by backward(inputs=...): right, and no other weight gets a gradient. Those of the
    second order are refused."""
    model = model_of()
    want, of = plain_step(model, batch())[1], dict(model.named_parameters())
    with attach(model, **HOW[how]):
        for names in map(str.split, CHOSEN.split("\n")[1:-1]):
            chosen = [of[n] for n in names]
            got = dict(zip(names, torch.autograd.grad(loss(model), chosen)))
            assert gradients(model) == {}
            loss(model).backward(inputs=chosen)
            for found in (got, gradients(model)):
                assert worst_error(found, {n: want[n] for n in names})[0] < 1e-5
            model.zero_grad()
            if (
                how != "inputs of some" and "model.embed_tokens.weight" in names
            ):  # whose gradient comes through all layers
                with pytest.raises(NotImplementedError, match=r"create_graph=True: .* first order only"):
                    torch.autograd.grad(loss(model), chosen, create_graph=True)


def test_chosen_weights_are_refused_where_gradients_are_taken_one_by_one():
    """An optimizer that steps in backward takes each gradient as it is made, so that no layer's are there at once."""
    model = model_of()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    says = r"torch.autograd.grad and backward\(inputs=...\).*use checkpoint=False"
    with attach(model, **TILES), pytest.raises(RuntimeError, match=says):
        torch.autograd.grad(loss(model), [model.model.embed_tokens.weight])


@pytest.mark.parametrize("how", PASSES)
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_the_layer_does_not_own(how, frozen):
    """Vectors that hooks add, as in steering, get their gradients too; in tiles also where no weight trains. They are
    none of the weights that are chosen."""
    model, layer = model_of().requires_grad_(False), 2
    vectors = nn.ParameterDict({n: torch.zeros(WIDTH) for n in ("self_attn", "mlp")})
    if frozen and "chunks" in how:
        pytest.skip("refused: see the next test")
    weight = model.model.layers[layer].self_attn.o_proj.weight.requires_grad_(not frozen)
    for name, vector in vectors.items():

        def add(module, args, out, vector=vector):
            return (out[0] + vector, *out[1:]) if isinstance(out, tuple) else out + vector

        getattr(model.model.layers[layer], name).register_forward_hook(add)
    found = []
    for options in (ALL_OFF, PASSES[how]):
        vectors.zero_grad()
        with attach(model, **options):
            if not frozen:
                torch.autograd.grad(loss(model), [weight])
                assert gradients(vectors) == {}
            found.append(train(model)[1] | gradients(vectors))
    assert worst_error(*found)[0] < 1e-5


def test_a_weight_that_nothing_owns_is_refused_in_a_frozen_layer_in_chunks():
    """Whose input needs no gradient: there is no graph to give the weight one."""
    model, vector = model_of().requires_grad_(False), torch.zeros(WIDTH, requires_grad=True)
    model.model.layers[2].mlp.register_forward_hook(lambda module, args, out: out + vector)
    with attach(model, chunk=20):
        check_refused("weight that no layer owns", loss, model)
        with torch.no_grad():
            loss(model)


@pytest.mark.parametrize("how", ["layers", "tiles", "chunks"])
def test_weights_that_are_frozen_before_their_backward(how):
    """An adapter that was switched off after the forward is not in the recompute."""
    wrapped = adapted()
    with attach(wrapped.get_base_model(), **PASSES[how]):
        made = loss(wrapped)
        with wrapped.disable_adapter(), pytest.raises(RuntimeError, match=r"weights were frozen.*between a forward"):
            made.backward()


# ----- what changes in place


@pytest.mark.parametrize("how", ["nothing", "layers in tiles", "chunks"])
def test_changes_in_place_of_what_a_layer_makes(how):
    """Embeddings, queries (as OLMo's clip_qkv), a norm's, an MLP's and a layer's output."""
    model = model_of()
    layer = model.model.layers[1]
    for part in (model.model.embed_tokens, layer.self_attn.q_proj, layer.input_layernorm, layer.mlp, layer):
        part.register_forward_hook(lambda module, args, out: out.clamp_(-0.7, 0.7))
    check_attached(model, batch(), 2, **HOW[how])


@pytest.mark.parametrize("how, part", [("tiles", "mlp"), ("layers", "input_layernorm"), ("chunks", "input_layernorm")])
def test_changes_in_place_of_an_input_are_refused(how, part):
    """A recompute would begin with what was changed: refused in the forward, by name, and not in an evaluation."""
    model = model_of()
    getattr(model.model.layers[1], part).register_forward_pre_hook(lambda module, args: (args[0].mul_(1.5),))
    with attach(model, **{**HOW[how], "tiles": {"mlp": 16, "loss": 16}}):
        check_refused(r"(LlamaMLP|LlamaDecoderLayer) changes its input in place", loss, model)
        with torch.inference_mode():
            evaluate(model)


# ----- on several ranks


def short_hosts(rank, world):
    """Rank 1 has a longer sample of its own than its host has room for; then a shorter one."""
    model, memory = model_of(max_position_embeddings=4 * LENGTH), 2 * INPUT
    with attach(model, alstlib.SPContext.create(1), save_attention=False, host_memory=memory, offload="sync") as handle:
        with pytest.raises(HostOutOfMemory) as error:
            loss(model, length=3 * LENGTH if rank else LENGTH)
        assert handle.store.peak_nbytes == 0
        loss(model, length=2 * LENGTH if rank else LENGTH).backward()
        return str(error.value), handle.plan.inputs_kept_every


def test_all_ranks_say_that_one_has_too_little_room(ranks2):
    first, second = ranks2(short_hosts)
    assert f"needs {INPUT:,} bytes of host memory more than rank 1 has left" in first[0]
    assert f"needs {3 * INPUT:,} bytes of host memory for this rank, and {2 * INPUT:,} are left" in second[0]
    assert first[1] == second[1] == LAYERS


@pytest.mark.parametrize("save", [False, "auto"])
def test_lengths_that_change_keep_to_the_budget(save):
    """What the plan allows is never refused in the middle, and slabs that are larger than needed are counted."""
    model, memory = model_of(), 3 * INPUT + OUTPUT
    with with_room(model, memory, save) as handle:
        for length in (64, 62, 54, 37, 64, 63, 52, 50, 47, 30, 33, 57, 64):
            loss(model, length=length).backward()
        assert handle.store.peak_nbytes <= memory


def test_what_is_granted_is_not_asked_for_again():
    """Other ranks of the machine take their share meanwhile."""
    room = LAYERS * (INPUT + OUTPUT)
    with attach(model_of(), **TILES, offload="sync") as handle:
        handle.store.room = lambda: room - 2 * handle.store.nbytes
        train(handle.model)
        assert (handle.plan.attention_kept, handle.store.nbytes) == (1, room)
