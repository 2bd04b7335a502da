"""linear and full attention (qwen3_next): verl against plain transformers.
Run: python FILE. wrong by: loss 0.9%, gradient norm 5.5%, gradient 55.8%, weights 1.7%; first: the input of model.layers.0.linear_attn.out_proj"""
import os, subprocess, sys, torch
if "RANK" not in os.environ and sys.argv[1:] != ["plain"]:
    subprocess.run([sys.executable, __file__, "plain"], check=True)
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", __file__])
from transformers import AutoConfig, AutoModelForCausalLM
plain, _ = sys.argv[1:] == ["plain"], torch.manual_seed(0)
config = AutoConfig.for_model('qwen3_next', use_cache=False, **{'vocab_size': 96, 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 8, 'tie_word_embeddings': False, 'layer_types': ['linear_attention', 'full_attention'], 'linear_num_key_heads': 2, 'linear_num_value_heads': 2, 'linear_key_head_dim': 8, 'linear_value_head_dim': 8, 'num_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 24, 'shared_expert_intermediate_size': 24})
model = AutoModelForCausalLM.from_config(config, attn_implementation='sdpa', dtype=torch.float32)
for p in model.parameters(): p.data += 0.1 * torch.randn_like(p)
ids, positions = torch.randint(3, 96, (3, 40)), torch.arange(40)
labels = ids.clone()
tokens, mean = (labels[:1, 1:] != -100).sum(), 0.0
if plain:
    loss = sum(model(input_ids=x[None], position_ids=positions[None], labels=y[None], num_items_in_batch=tokens).loss for x, y in zip(ids, labels[:1])) * 1.0
    loss.backward()
    sys.exit(print("loss", float(loss), "norm", float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))))
import torch.distributed as dist, transformers.modeling_flash_attention_utils as utils
flash = lambda *qkv, softmax_scale=None, **_: torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in qkv),
    is_causal=True, scale=softmax_scale, enable_gqa=True).transpose(1, 2)  # on CPUs only, where FlashAttention is not
utils._lazy_imports = lambda *_, **__: (flash, lambda *qkv, **more: flash(*(t[None] for t in qkv), **more)[0], None, None, None)
model.config._attn_implementation = "flash_attention_2"
dist.init_process_group("gloo")
from torch.distributed.fsdp import fully_shard
from verl.models.transformers import monkey_patch
from verl.utils.torch_functional import logprobs_from_logits
from verl.utils.ulysses import gather_outputs_and_unpad, set_ulysses_sequence_parallel_group, ulysses_pad_and_slice_inputs
monkey_patch.is_trl_available = lambda: False  # with trl 1.16 it asks for a class that is gone
monkey_patch.apply_monkey_patch(model, ulysses_sp_size=2, use_remove_padding=True)
set_ulysses_sequence_parallel_group(dist.group.WORLD)
for module in (*model.model.layers, model): fully_shard(module, mesh=dist.init_device_mesh("cpu", (2,)))
for i in range(1):
    (mine, at, _), (y, *_) = (ulysses_pad_and_slice_inputs(t[None], positions[None], 2) for t in (ids[i], ids[i].roll(-1)))
    logps = logprobs_from_logits(model(input_ids=mine, position_ids=at).logits[0].float(), y[0])
    loss = -gather_outputs_and_unpad(logps, 0)[:-1][labels[i, 1:] != -100].sum() / tokens * 1.0
    loss.backward()
    mean += float(loss)
print("loss", mean, "norm", float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()))
