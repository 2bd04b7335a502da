"""Reproducers of wrong cells: scripts of at most 40 lines that need only the stack, transformers and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cases import CASES, EAGER, MODELS, WIDTHS, Case

DATA = {
    "even": "",
    "prompts": "for i, y in enumerate(labels): y[: 1 + 5 * i % 36] = -100\n",
    "first_half": "labels[:, 20:] = -100\n",
    "some_without": "labels[0] = -100\n",
    "packed": "labels[:, [0, 9, 33]] = -100\n",
}
"""What has no label."""
POSITIONS = {"packed": "torch.cat([torch.arange(n) for n in (9, 24, 7)])"}
HEAD = '''"""{title}: {stack} against plain transformers.
Run: {run}. {said}"""
import os, subprocess, sys
if "RANK" not in os.environ and sys.argv[1:] != ["plain"]:
    for command in ([__file__, "plain"], ["-m", "torch.distributed.run", "--nproc-per-node=2", __file__]):
        subprocess.run([sys.executable, *command], check=True)
    sys.exit()
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
plain, _ = sys.argv[1:] == ["plain"], torch.manual_seed(0)
config = AutoConfig.for_model({kind!r}, use_cache=False, **{fields})
model = AutoModelForCausalLM.from_config(config, attn_implementation={attention!r}, dtype=torch.{dtype})
{lora}for p in model.parameters(): p.data += 0.1 * torch.randn_like(p)
ids, positions = torch.randint(3, 96, ({count}, 40)), {positions}
labels = ids.clone()
{labels}'''
SP = """from accelerate import ParallelismConfig
from accelerate.state import DistributedType, PartialState
from accelerate.utils import DeepSpeedSequenceParallelConfig
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
args = TrainingArguments(
    "out", per_device_train_batch_size=1, max_steps=3, logging_steps=1, learning_rate=2e-3, max_grad_norm={clip},
    gradient_accumulation_steps={accumulation}, report_to=[], save_strategy="no", disable_tqdm=True, bf16=False,
    **more{arguments})
collate = lambda s: {{n: torch.stack([x[n] for x in s]) for n in s[0]}}
{scaled}trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows, data_collator=collate)
trainer.train()
if os.environ.get("RANK", "0") == "0":
    for line in trainer.state.log_history[:-1]: print({{n: line[n] for n in ("loss", "grad_norm", "eval_loss") if n in line}})
"""  # noqa: E501
LOOP = """if plain:
    loss = sum(model(input_ids=ids[i][None], position_ids=positions[None], labels=labels[i][None], num_items_in_batch=(
        labels[:{accumulation}, 1:] != -100).sum()).loss for i in range({accumulation})) * {scale}
    loss.backward()
    sys.exit(print("loss", float(loss), "norm", float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))))
import deepspeed, deepspeed.comm.torch, torch.distributed.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # on CPUs only: nothing is compiled
deepspeed.init_distributed(dist_backend="gloo")
mpu = UlyssesSPAttentionHF.register_with_transformers({base}, {attention!r}, 2, 1, seq_length_is_variable=True)
zero = {{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": {accumulation}, "zero_optimization": {{"stage": {stage}}}}}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), mpu=mpu, config=zero)
mean, group, mine = 0.0, mpu.get_sequence_parallel_group(), slice(20 * engine.global_rank, 20 * engine.global_rank + 20)
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
LORA = """import peft; model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
"""
SCALED = """loss_of = Trainer.compute_loss
Trainer.compute_loss = lambda *given, **more: loss_of(*given, **more) * {scale}
"""
TEMPLATES = {
    "accelerate-sp": SP + TRAIN, "accelerate-sp-zero2": SP + TRAIN, "accelerate-cp": CP + TRAIN, "deepspeed": LOOP,
    "deepspeed-zero2": LOOP,
}  # fmt: skip
STAND_IN = ("accelerate-cp",)
"""Those that run on CPUs over `ring.stand_in` only."""
RUN = {"accelerate-cp": "python FILE, on two GPUs (on CPUs PyTorch's ring has no attention operators)"}


def file_of(stack: str, case: str) -> str:
    return f"{stack}-{case}.py".replace(" ", "_")


def script(stack: str, case: Case, said: str) -> str:
    """The reproducer's text."""
    left_out = ("max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
    fields = {n: v for n, v in {**WIDTHS, **MODELS[case.model]}.items() if n not in left_out}
    kind = fields.pop("model_type", case.model)
    text = HEAD + TEMPLATES[stack]
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": case.evaluate}
    arguments = {**case.arguments, **(evaluation if case.evaluate else {})}
    return text.format(
        title=case.title, stack=stack, said=said, run=RUN.get(stack, "python FILE"), kind=kind, fields=fields,
        attention="eager" if case.model in EAGER else "sdpa", dtype=case.dtype,
        count=3 * case.accumulation, positions=POSITIONS.get(case.data, "torch.arange(40)"),
        labels=DATA[case.data], clip=case.clip or 1e9, accumulation=case.accumulation,
        arguments="".join(f", {n}={v!r}" for n, v in arguments.items()), scale=case.scale,
        lora=LORA if case.lora else "", base="model.get_base_model()" if case.lora else "model",
        scaled=SCALED.format(scale=case.scale) if case.scale != 1.0 else "",
        stage=2 if stack.endswith("zero2") else 3,
    )  # fmt: skip


def writable(stack: str, case: Case, cell: dict[str, Any]) -> bool:
    """Whether the templates can say the case."""
    return cell["result"] == "wrong" and stack in TEMPLATES and case.data in DATA and not case.resume


def write(folder: Path, cells: dict[str, dict[str, Any]], said: Callable[[dict[str, Any]], str]) -> None:
    """A script for each wrong cell that the templates can say, with the words `said` of it."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    for stack, judged in cells.items():
        for name, cell in judged.items():
            if writable(stack, CASES[name], cell):
                (folder / file_of(stack, name)).write_text(script(stack, CASES[name], said(cell)))
