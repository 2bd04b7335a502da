"""Reproducers of wrong cells: scripts of at most 40 lines that need only the stack, transformers and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cases import CASES, EAGER, MODELS, WIDTHS, Case

DATA = {
    "even": "",
    "uneven": "ids, positions, labels = ids[:, :12], positions[:12], labels[:, :12]\n",
    "prompts": "for i, y in enumerate(labels): y[: 1 + 5 * i % 36] = -100\n",
    "first_half": "labels[:, 20:] = -100\n",
    "some_without": "labels[0] = -100\n",
    "packed": "labels[:, [0, 9, 33]] = -100\n",
}
"""What has no label; or the length of the first sample."""
POSITIONS = {"packed": "torch.cat([torch.arange(n) for n in (9, 24, 7)])"}
HEAD = '''"""{title}: {stack} against plain transformers.
Run: {run}. {said}"""
import os, subprocess, sys, torch
if "RANK" not in os.environ and sys.argv[1:] != ["plain"]:
    subprocess.run([sys.executable, __file__, "plain"], check=True)
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", __file__])
from transformers import AutoConfig, AutoModelForCausalLM{names}
plain, _ = sys.argv[1:] == ["plain"], torch.manual_seed(0)
config = AutoConfig.for_model({kind!r}, use_cache=False, **{fields})
model = AutoModelForCausalLM.from_config(config, attn_implementation={attention!r}, dtype=torch.{dtype})
{lora}for p in model.parameters(): p.data += 0.1 * torch.randn_like(p)
ids, positions = torch.randint(3, 96, ({count}, 40)), {positions}
labels = ids.clone()
{labels}'''
SP = """from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DeepSpeedSequenceParallelConfig, DistributedType
zero = {{"zero_optimization": {{"stage": {stage}}}, "zero_allow_untested_optimizer": True, "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": "auto"}}
sp = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig(
    sp_seq_length_is_variable=True, sp_attn_implementation={attention!r}))
more = {{"use_cpu": True}} if plain else {{"deepspeed": zero, "parallelism_config": sp}}
if not plain:  # on CPUs only: gloo, and no operator is compiled
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", DS_ACCELERATOR="cpu")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    import deepspeed.comm.torch
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
"""
CP = """from accelerate import ParallelismConfig
more = {{"use_cpu": True}} if plain else {{"parallelism_config": ParallelismConfig(cp_size=2), "fsdp": True,
    "fsdp_config": {{"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}}}
"""
TRAIN = """rows = [{{"input_ids": x, "labels": y, "position_ids": positions}} for x, y in zip(ids, labels)]
{sft}args = {config}(
    "out", per_device_train_batch_size=1, max_steps=3, logging_steps=1, learning_rate=2e-3, max_grad_norm={clip}, **more,
    gradient_accumulation_steps={accumulation}, report_to=[], save_strategy="no", disable_tqdm=True, bf16=False{arguments})
collate = lambda s: {{n: torch.stack([x[n] for x in s]) for n in s[0]}}
{scaled}trainer = {trainer}(model, args, train_dataset=rows, eval_dataset=rows, data_collator=collate{words})
trainer.train()
if os.environ.get("RANK", "0") == "0":
    for line in trainer.state.log_history[:-1]: print({{n: line[n] for n in ("loss", "grad_norm", "eval_loss") if n in line}})
"""  # noqa: E501
SFT = """from datasets import Dataset
rows = Dataset.from_list(rows).with_format("torch")
"""
PLAIN = """tokens, mean = (labels[:{accumulation}, 1:] != -100).sum(), 0.0
if plain:
    loss = sum(model(input_ids=x[None], position_ids=positions[None], labels=y[None], num_items_in_batch=tokens).loss for x, y in zip(ids, labels[:{accumulation}])) * {scale}
    loss.backward()
    sys.exit(print("loss", float(loss), "norm", float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))))
"""  # noqa: E501
ULYSSES = """import deepspeed, deepspeed.comm.torch, torch.distributed.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # on CPUs only: nothing is compiled
deepspeed.init_distributed(dist_backend="gloo")
mpu = UlyssesSPAttentionHF.register_with_transformers({base}, {attention!r}, 2, 1, seq_length_is_variable=True)
zero = {{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": {accumulation}, "zero_optimization": {{"stage": {stage}}}}}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), mpu=mpu, config=zero)
group, mine = mpu.get_sequence_parallel_group(), slice(20 * engine.global_rank, 20 * engine.global_rank + 20)
for i in range({accumulation}):
    logits = engine(input_ids=ids[i][None, mine], position_ids=positions[None, mine]).logits
    y = torch.nn.functional.pad(labels[i][None], (0, 1), value=-100)[:, 1:][:, mine].contiguous()
    loss = model.loss_function(logits, None, config.vocab_size, shift_labels=y)
    losses, good = F.all_gather(loss, group), F.all_gather((y != -100).sum(), group)
    loss = sum(l * n for l, n in zip(losses, good) if n > 0) / max(sum(good), 1) * {scale}
    engine.backward(loss)
    engine.step()
    mean += float(loss) / {accumulation}
print("loss", mean, "norm", float(engine.get_global_grad_norm()))
"""  # noqa: E501
FLASH = """import torch.distributed as dist, transformers.modeling_flash_attention_utils as utils
flash = lambda *qkv, softmax_scale=None, **_: torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in qkv),
    is_causal=True, scale=softmax_scale, enable_gqa=True).transpose(1, 2)  # on CPUs only, where FlashAttention is not
utils._lazy_imports = lambda *_, **__: (flash, lambda *qkv, **more: flash(*(t[None] for t in qkv), **more)[0], None, None, None)
model.config._attn_implementation = "flash_attention_2"
dist.init_process_group("gloo")
"""  # noqa: E501
VERL = """from torch.distributed.fsdp import fully_shard
from verl.models.transformers import monkey_patch
from verl.utils.torch_functional import logprobs_from_logits
from verl.utils.ulysses import gather_outputs_and_unpad, set_ulysses_sequence_parallel_group, ulysses_pad_and_slice_inputs
monkey_patch.is_trl_available = lambda: False  # with trl 1.16 it asks for a class that is gone
monkey_patch.apply_monkey_patch({base}, ulysses_sp_size=2, use_remove_padding=True)
set_ulysses_sequence_parallel_group(dist.group.WORLD)
for module in (*{base}.model.layers, model): fully_shard(module, mesh=dist.init_device_mesh("cpu", (2,)))
for i in range({accumulation}):
    (mine, at, _), (y, *_) = (ulysses_pad_and_slice_inputs(t[None], positions[None], 2) for t in (ids[i], ids[i].roll(-1)))
    logps = logprobs_from_logits(model(input_ids=mine, position_ids=at).logits[0].float(), y[0])
    loss = -gather_outputs_and_unpad(logps, 0)[:-1][labels[i, 1:] != -100].sum() / tokens * {scale}
    loss.backward()
    mean += float(loss)
print("loss", mean, "norm", float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()))
"""  # noqa: E501
SWIFT = """from types import SimpleNamespace
from swift.sequence_parallel import sequence_parallel
from swift.trainers.utils import per_token_loss_func_sp
{base}.model_info, {base}.model_meta = SimpleNamespace(is_moe_model={experts}), SimpleNamespace(model_arch=None)
sequence_parallel.prepare(2, {base}, SimpleNamespace(pad_token_id=0), padding_free=True)
engine = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
labels[:, 0] = -100
for i in range({accumulation}):
    inputs = {{"input_ids": ids[i][None], "labels": labels[i][None], "position_ids": positions[None]}}
    sequence_parallel.prepare_inputs(inputs)
    out, y = engine(**{{n: t for n, t in inputs.items() if n != "labels"}}), inputs["labels"]
    loss = (per_token_loss_func_sp(out, y).sum(){router}) / tokens * {scale}
    loss.backward(), dist.all_reduce(loss.data)
    mean += float(loss) / 2
print("loss", mean, "norm", float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
"""
AXOLOTL = """import torch.distributed as dist, transformers.modeling_flash_attention_utils as utils, types
def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size_left, **_):  # on CPUs only, in place of FlashAttention
    parts = zip(*(t.transpose(0, 1).split(n.diff().tolist(), 1) for t, n in zip((q, k, v), (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k))))
    seen = lambda n, m: torch.ones(n, m).tril(m - n).triu(m - n - window_size_left % 99) > 0  # -1: no window
    return torch.cat([torch.nn.functional.scaled_dot_product_attention(q, k, v, seen(q.shape[1], k.shape[1]), scale=softmax_scale, enable_gqa=True) for q, k, v in parts], 1).transpose(0, 1)
def backward(dout, dq, dk, dv, **how):
    how |= {{n: how[n].detach().requires_grad_() for n in "qkv"}}
    with torch.enable_grad(): [t.copy_(g) for t, g in zip((dq, dk, dv), torch.autograd.grad(attend(**how), [how[n] for n in "qkv"], dout))]
sys.modules["flash_attn"] = sys.modules["flash_attn.flash_attn_interface"] = flash = types.ModuleType("flash_attn")
flash.__dict__.update(_flash_attn_forward=None, _flash_attn_backward=None, _flash_attn_varlen_backward=backward, _flash_attn_varlen_forward=lambda **how: (attend(**how), torch.zeros(how["q"].shape[1], len(how["q"])), None, None))
add, dist.all_reduce = dist.all_reduce, lambda t, op, group: (add(t, group=group), t.floor_divide_(2))  # gloo has no averages
utils.is_flash_attn_greater_or_equal_2_10, torch.cuda.current_device, model.config._attn_implementation = True, lambda: "cpu", "flash_attention_2"
from axolotl.utils.ctx_managers.sequence_parallel import RingAttnFunc, SequenceParallelContextManager
dist.init_process_group("gloo")
SequenceParallelContextManager([model], 2, {accumulation}, RingAttnFunc.VARLEN_LLAMA3, 1, False, dist.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))).__enter__()
engine = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
for x, y in zip(ids, labels[:{accumulation}]):
    loss = engine(input_ids=x[None], position_ids=positions[None], labels=y[None], num_items_in_batch=tokens).loss * {scale}
    loss.backward(), add(loss.data)
    mean += float(loss) / 2
print("loss", mean, "norm", float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
"""  # noqa: E501
ROUTER = " + config.router_aux_loss_coef * out.aux_loss * (y[:, 1:] != -100).sum()"
LORA = """import peft; model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
"""
SCALED = """loss_of = {trainer}.compute_loss
{trainer}.compute_loss = lambda *given, **more: loss_of(*given, **more) * {scale}
"""
TEMPLATES = {
    "accelerate-sp": SP + TRAIN, "accelerate-sp-zero2": SP + TRAIN, "accelerate-cp": CP + TRAIN, "trl-sp": SP + TRAIN,
    "trl-cp": CP + TRAIN, "deepspeed": PLAIN + ULYSSES, "deepspeed-zero2": PLAIN + ULYSSES,
    "verl": PLAIN + FLASH + VERL, "ms-swift": PLAIN + FLASH + SWIFT, "axolotl": PLAIN + AXOLOTL,
}  # fmt: skip
STAND_IN = ("accelerate-cp", "trl-cp")
"""Those that run on CPUs over `ring.stand_in` only."""
CAUSAL = ("verl", "ms-swift")
"""Those whose stand-in for FlashAttention knows one causal document only."""
ANY_LENGTH = (*CAUSAL, "axolotl")
"""Those that cut samples of any length."""
ON_GPUS = "python FILE, on two GPUs (on CPUs PyTorch's ring has no attention operators)"


def file_of(stack: str, case: str) -> str:
    return f"{stack}-{case}.py".replace(" ", "_")


def script(stack: str, case: Case, said: str) -> str:
    """The reproducer's text."""
    left_out = ("max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
    fields = {n: v for n, v in {**WIDTHS, **MODELS[case.model]}.items() if n not in left_out}
    kind = fields.pop("model_type", case.model)
    text = HEAD + TEMPLATES[stack]
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": case.evaluate}
    sft, trainer = stack.startswith("trl"), TRAIN in TEMPLATES[stack]
    prepared = {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    arguments = {**case.arguments, **(evaluation if case.evaluate else {}), **(prepared if sft else {})}
    classes = ("SFTTrainer", "SFTConfig") if sft else ("Trainer", "TrainingArguments")
    names = f", ByT5Tokenizer\nfrom trl import {', '.join(classes)}" if sft else f", {', '.join(classes)}" * trainer
    return text.format(
        title=case.title, stack=stack, said=said, run=ON_GPUS if stack in STAND_IN else "python FILE", kind=kind,
        fields=fields, attention="eager" if case.model in EAGER else "sdpa", dtype=case.dtype,
        count=3 * case.accumulation, positions=POSITIONS.get(case.data, "torch.arange(40)"),
        labels=DATA[case.data], clip=case.clip or 1e9, accumulation=case.accumulation,
        arguments="".join(f", {n}={v!r}" for n, v in arguments.items()), scale=case.scale,
        lora=LORA if case.lora else "", base="model.get_base_model()" if case.lora else "model",
        scaled=SCALED.format(scale=case.scale, trainer=classes[0]) if case.scale != 1.0 else "",
        names=names, trainer=classes[0], config=classes[1], sft=SFT if sft else "",
        words=", processing_class=ByT5Tokenizer()" if sft else "", experts="num_experts_per_tok" in fields,
        router=ROUTER if "output_router_logits" in fields else "",
        stage=2 if stack.endswith("zero2") else 3,
    )  # fmt: skip


def writable(stack: str, case: Case, cell: dict[str, Any]) -> bool:
    """Whether the templates can say the case."""
    if cell["result"] != "wrong" or stack not in TEMPLATES or case.data not in DATA or case.resume:
        return False
    if case.data == "uneven" and stack not in ANY_LENGTH:
        return False
    masked = case.data == "packed" or "sliding_window" in MODELS[case.model]
    return TRAIN in TEMPLATES[stack] or not (case.only_under_trainer or (masked and stack in CAUSAL))


def write(folder: Path, cells: dict[str, dict[str, Any]], said: Callable[[dict[str, Any]], str]) -> None:
    """A script for each wrong cell that the templates can say, with the words `said` of it."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    for stack, judged in cells.items():
        for name, cell in judged.items():
            if writable(stack, CASES[name], cell):
                (folder / file_of(stack, name)).write_text(script(stack, CASES[name], said(cell)))
