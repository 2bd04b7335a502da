"""weights in bf16: accelerate-sp-zero2 against plain transformers.
Run: python FILE. wrong by: gradient norm 99.7%, gradient 100.5%, weights 3e-04; first: no module: how gradients are summed over ranks or batches, or what is reported"""
import os, subprocess, sys, torch
if "RANK" not in os.environ and sys.argv[1:] != ["plain"]:
    subprocess.run([sys.executable, __file__, "plain"], check=True)
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", __file__])
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
plain, _ = sys.argv[1:] == ["plain"], torch.manual_seed(0)
config = AutoConfig.for_model('llama', use_cache=False, **{'vocab_size': 96, 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 8, 'tie_word_embeddings': False})
model = AutoModelForCausalLM.from_config(config, attn_implementation='sdpa', dtype=torch.bfloat16)
for p in model.parameters(): p.data += 0.1 * torch.randn_like(p)
ids, positions = torch.randint(3, 96, (3, 40)), torch.arange(40)
labels = ids.clone()
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DeepSpeedSequenceParallelConfig, DistributedType
zero = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True, "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": "auto"}
sp = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig(
    sp_seq_length_is_variable=True, sp_attn_implementation='sdpa'))
more = {"use_cpu": True} if plain else {"deepspeed": zero, "parallelism_config": sp}
if not plain:  # on CPUs only: gloo, and no operator is compiled
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", DS_ACCELERATOR="cpu")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    import deepspeed.comm.torch
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
rows = [{"input_ids": x, "labels": y, "position_ids": positions} for x, y in zip(ids, labels)]
args = TrainingArguments(
    "out", per_device_train_batch_size=1, max_steps=3, logging_steps=1, learning_rate=2e-3, max_grad_norm=1000000000.0, **more,
    gradient_accumulation_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, bf16=False)
collate = lambda s: {n: torch.stack([x[n] for x in s]) for n in s[0]}
trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows, data_collator=collate)
trainer.train()
if os.environ.get("RANK", "0") == "0":
    for line in trainer.state.log_history[:-1]: print({n: line[n] for n in ("loss", "grad_norm", "eval_loss") if n in line})
