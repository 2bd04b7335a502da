"""linear and full attention (qwen3_next): axolotl against plain transformers.
Run: python FILE. wrong by: loss 5.2%, gradient norm 16.6%, gradient 73.5%, weights 1.8%; first: the input of model.layers.0.linear_attn.out_proj"""
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
import torch.distributed as dist, transformers.modeling_flash_attention_utils as utils, types
def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size_left, **_):  # on CPUs only, in place of FlashAttention
    parts = zip(*(t.transpose(0, 1).split(n.diff().tolist(), 1) for t, n in zip((q, k, v), (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k))))
    seen = lambda n, m: torch.ones(n, m).tril(m - n).triu(m - n - window_size_left % 99) > 0  # -1: no window
    return torch.cat([torch.nn.functional.scaled_dot_product_attention(q, k, v, seen(q.shape[1], k.shape[1]), scale=softmax_scale, enable_gqa=True) for q, k, v in parts], 1).transpose(0, 1)
def backward(dout, dq, dk, dv, **how):
    how |= {n: how[n].detach().requires_grad_() for n in "qkv"}
    with torch.enable_grad(): [t.copy_(g) for t, g in zip((dq, dk, dv), torch.autograd.grad(attend(**how), [how[n] for n in "qkv"], dout))]
sys.modules["flash_attn"] = sys.modules["flash_attn.flash_attn_interface"] = flash = types.ModuleType("flash_attn")
flash.__dict__.update(_flash_attn_forward=None, _flash_attn_backward=None, _flash_attn_varlen_backward=backward, _flash_attn_varlen_forward=lambda **how: (attend(**how), torch.zeros(how["q"].shape[1], len(how["q"])), None, None))
add, dist.all_reduce = dist.all_reduce, lambda t, op, group: (add(t, group=group), t.floor_divide_(2))  # gloo has no averages
utils.is_flash_attn_greater_or_equal_2_10, torch.cuda.current_device, model.config._attn_implementation = True, lambda: "cpu", "flash_attention_2"
from axolotl.utils.ctx_managers.sequence_parallel import RingAttnFunc, SequenceParallelContextManager
dist.init_process_group("gloo")
SequenceParallelContextManager([model], 2, 1, RingAttnFunc.VARLEN_LLAMA3, 1, False, dist.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))).__enter__()
engine = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
for x, y in zip(ids, labels[:1]):
    loss = engine(input_ids=x[None], position_ids=positions[None], labels=y[None], num_items_in_batch=tokens).loss * 1.0
    loss.backward(), add(loss.data)
    mean += float(loss) / 2
print("loss", mean, "norm", float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
