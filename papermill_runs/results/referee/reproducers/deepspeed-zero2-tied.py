"""tied embeddings: deepspeed-zero2 against plain transformers.
Run: python FILE. wrong by: gradient norm 100.0%, gradient 100.0%, weights 5e-05; every gradient is 2 times as large; first: no module: how gradients are summed over ranks or batches, or what is reported"""
import os, subprocess, sys, torch
if "RANK" not in os.environ and sys.argv[1:] != ["plain"]:
    subprocess.run([sys.executable, __file__, "plain"], check=True)
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", __file__])
from transformers import AutoConfig, AutoModelForCausalLM
plain, _ = sys.argv[1:] == ["plain"], torch.manual_seed(0)
config = AutoConfig.for_model('llama', use_cache=False, **{'vocab_size': 96, 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 8, 'tie_word_embeddings': True})
model = AutoModelForCausalLM.from_config(config, attn_implementation='sdpa', dtype=torch.float32)
for p in model.parameters(): p.data += 0.1 * torch.randn_like(p)
ids, positions = torch.randint(3, 96, (3, 40)), torch.arange(40)
labels = ids.clone()
tokens, mean = (labels[:1, 1:] != -100).sum(), 0.0
if plain:
    loss = sum(model(input_ids=x[None], position_ids=positions[None], labels=y[None], num_items_in_batch=tokens).loss for x, y in zip(ids, labels[:1])) * 1.0
    loss.backward()
    sys.exit(print("loss", float(loss), "norm", float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))))
import deepspeed, deepspeed.comm.torch, torch.distributed.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # on CPUs only: nothing is compiled
deepspeed.init_distributed(dist_backend="gloo")
mpu = UlyssesSPAttentionHF.register_with_transformers(model, 'sdpa', 2, 1, seq_length_is_variable=True)
zero = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), mpu=mpu, config=zero)
group, mine = mpu.get_sequence_parallel_group(), slice(20 * engine.global_rank, 20 * engine.global_rank + 20)
for i in range(1):
    logits = engine(input_ids=ids[i][None, mine], position_ids=positions[None, mine]).logits
    y = torch.nn.functional.pad(labels[i][None], (0, 1), value=-100)[:, 1:][:, mine].contiguous()
    loss = model.loss_function(logits, None, config.vocab_size, shift_labels=y)
    losses, good = F.all_gather(loss, group), F.all_gather((y != -100).sum(), group)
    loss = sum(l * n for l, n in zip(losses, good) if n > 0) / max(sum(good), 1) * 1.0
    engine.backward(loss)
    engine.step()
    mean += float(loss) / 1
print("loss", mean, "norm", float(engine.get_global_grad_norm()))
