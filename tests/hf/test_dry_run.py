"""What a dry run sees of a model, and what is refused by it before anything is attached. Positions that a model numbers
by itself are in the sweep's sample (tests/sweep), for RoBERTa."""

import copy
import importlib.machinery
import sys
import types

import pytest
import torch
import zoo
from cases import attach, check_attached, check_refused, make_model, same, sample_of
from test_attach import anatomy
from transformers.modeling_layers import GradientCheckpointingLayer
from zoo import small

from alstlib.hf.dry_run import Keys, LayerCall, dry_run
from alstlib.hf.support import _keys, check_attention


def run(model):
    return dry_run(model, [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)])[0]


def test_kernels_of_triton_are_not_launched(monkeypatch):
    """To them a tensor without memory is a null pointer: Liger's ended a run on a GPU with an illegal access."""

    class KernelInterface:
        def __getitem__(self, grid):
            raise AssertionError("launched")

    class Norm(torch.nn.Module):
        def forward(self, x):
            KernelInterface()[1,](x)
            return x

    triton, runtime, jit = (types.ModuleType(name) for name in ("triton", "triton.runtime", "triton.runtime.jit"))
    jit.KernelInterface = KernelInterface
    triton.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    for module in (triton, runtime, jit):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    model = make_model()
    for layer in model.model.layers:
        layer.input_layernorm = Norm()
    assert all(call.finished and call.attention for call in run(model))
    with pytest.raises(AssertionError, match="launched"):
        Norm()(torch.ones(1))


def test_a_dry_run_leaves_the_model_as_it_was():
    """Also weights that have two names; and no hook is called: hooks are the user's, count calls, or read values, of
    which a dry run has none."""
    model, called = make_model("gpt2", attn_pdrop=0.5).eval(), []
    first, second = model.transformer.h
    first.train()
    second.forward, second.mlp, second.attn = second.forward, first.mlp, first.attn
    for module in model.modules():
        module.register_forward_hook(lambda *_: called.append("after"))
        module.register_forward_pre_hook(lambda *_: called.append("before"))

    before, weights, random = anatomy(model), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert [a.dropout for call in run(model) for a in call.attention] == [0.5, 0.5]
    assert anatomy(model) == before
    assert same(model.state_dict(), weights)
    assert torch.equal(torch.get_rng_state(), random)
    assert not called
    model(torch.zeros(1, 4, dtype=torch.long))
    assert {"before", "after"} == set(called)


def test_a_model_gives_its_routers_outputs_after_a_dry_run():
    """transformers installs the hooks that capture them in the model's first call, which the dry run is not."""
    model = zoo.build("mixtral")
    run(model)
    assert len(model(torch.tensor([[5, 6, 7]])).router_logits) == model.config.num_hidden_layers


def test_a_config_may_name_several_ends():
    """As those of Llama 3.1 and GLM 4 do: the dry run's token is none of them."""
    model = make_model(eos_token_id=[0, 1], pad_token_id=2)
    assert len(run(model)) == 2


def test_a_dry_run_reads_no_weights():
    """A model of any size: here one that would not fit, without memory."""
    with torch.device("meta"):
        model = small("LlamaConfig", hidden_size=16384, intermediate_size=53248, num_hidden_layers=40)
    assert len(run(model)) == 40


# ----- what is not refused at `apply`; all that is has a table in test_attach


def phimoe():
    return small("PhimoeConfig", sliding_window=7, num_local_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize("options", [{}, {"chunk": 5}])
def test_a_window_that_only_the_mask_has(options):
    """Phi-3.5-MoE's attention does not say it. Its router draws random numbers where it trains."""
    model = phimoe().eval()
    check_attached(model, sample_of(26), **options)
    model.config.sliding_window = None
    check_attached(model, sample_of(26), **options)


def test_a_window_that_only_some_masks_may_have_is_refused():
    model = phimoe()
    message = r"layer 0 \(PhimoeAttention\) may slide by config.sliding_window=7, .* set it to None if no"
    check_refused(message, check_attention, model.model.layers[0].self_attn, None, 0.0, {})


def test_facts_of_a_layer_are_those_of_the_layer():
    """Gemma 4's heads are wider in some layers; its mapping of keys is not read where none are shared."""
    model = small("Gemma4TextConfig", head_dim=8, global_head_dim=16, vocab_size_per_layer_input=zoo.VOCAB,
        hidden_size_per_layer_input=8, layer_types=zoo.LAYER_TYPES, sliding_window=7,
    )  # fmt: skip
    with attach(model) as handle:
        assert (handle.facts.output.heads, handle.facts.output.value_width) == (4, 16)


def test_a_layer_with_attention_and_a_state_attends():
    """Also where its dry run ended before its attention."""
    layer, most = zoo.build_hybrid("falcon_h1").model.layers[0], Keys(4, 2, 8, 8)
    assert _keys(LayerCall(layer, torch.empty(0), ()), most) == most


def test_a_layer_with_a_state_whose_attention_is_its_own_is_refused():
    """It would see its own slice only."""
    model = zoo.build_hybrid("falcon_h1")
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states.cumsum(1), None)
    check_refused("computes attention by itself, not through transformers' AttentionInterface", attach, model)
