"""The claims of one_gpu.ipynb: a million tokens on one GPU, with a disk under the host.

A claim is a command of `alst plan`. `smaller` makes a run of it that is smaller by known factors, and `measured` trains
that run on this machine. `python notebooks/one_gpu.py` plans the claims, and simulates a whole step of each (a quarter
of an hour of processor time): papermill_runs/results/planner/one_gpu.json.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoConfig

import alstlib
from alstlib.base.config import RunConfig
from alstlib.hf.loading.public_models import PUBLIC
from alstlib.planner.command import add_arguments, read
from alstlib.planner.machine import machine_of
from alstlib.planner.measure.ledger import Ledger
from alstlib.planner.measure.simulate import shard_of, simulate, whole_model
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.preflight import as_metrics, foretell
from alstlib.planner.question import Question
from alstlib.runs.train.engine import host_tensors, initialize, take_step

FILE = Path(__file__).resolve().parents[1] / "papermill_runs/results/planner/one_gpu.json"
PLAN = (
    "alst plan --gpus 1 --seq-len 1M --disk 2TB --set options.chunk=65536 --model {} --gpu {} --host-memory {} --set {}"
)
ADAPTER = "'model.lora={r: 16}' --set engine.offload_optimizer=false --set options.on_host="
CLAIMS = {
    "LoRA, 80 GB": PLAN.format("Qwen/Qwen3-8B", "H100", "128GB", f"{ADAPTER}none"),
    "QLoRA, 24 GB": PLAN.format("Qwen/Qwen3-8B", "RTX4090", "64GB", f"{ADAPTER}hidden+kv --set model.bits=4"),
    "all weights, 80 GB": PLAN.format("meta-llama/Llama-3.1-8B", "H100", "256GB", "options.on_host=hidden"),
}
"""What is planned, by what is trained and the GPU's memory."""
OF_A_STEP = ("attention", "checkpoints", "exchange", "hidden states", "loss", "mlp")
"""Categories of device memory that a simulated step has too."""
SIZES = {"device": "allocated_bytes", "host": "host_peak_bytes", "disk": "disk_peak_bytes"}
"""The bytes that are compared, as a result records their predictions."""


def asked(command: str) -> tuple[Question, int]:
    """The question that a command asks, and the tokens of a sample."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    request = read(parser.parse_args(shlex.split(command)[2:]))
    return request.question(request.machines[0], 1), request.seq_len or 0


def simulated(claim: Mapping[str, Any]) -> dict[str, int]:
    """What a whole step of a claim takes besides its states, at its length and with all layers: the peak on the device,
    and all that is kept on the host or a disk. It keeps attention's outputs as the plan does, which knows the host."""
    question, length = asked(claim["command"])
    keeps = bool(claim["plan"]["host"]["attention_kept"])
    found = simulate(question.run.replace(data={"seq_len": length}, options={"save_attention": keeps}), ranks=1)
    return {"device": found.device_peak, "kept": found.host_peak}


def smaller(claim: Mapping[str, Any], folder: str, tokens: int, divisor: int) -> RunConfig:
    """A claim's run with as many layers, whose widths are divided by `divisor`, on so many tokens, and on a host that
    has the same part of what checkpoints take.

    Args:
        claim: as the stored file has it.
        folder: it gets the model's config, and the disk's file.
    """
    question, length = asked(claim["command"])
    shape, few = question.shape, min(divisor, 8)
    config = {
        **PUBLIC[shape.name], "vocab_size": shape.vocab // divisor, "hidden_size": shape.width // divisor,
        "intermediate_size": shape.mlp // divisor, "num_attention_heads": shape.heads // few,
        "num_key_value_heads": shape.kv_heads // few, "head_dim": shape.head_dim * few // divisor,
    }  # fmt: skip
    AutoConfig.for_model(**config).save_pretrained(folder)
    element = 2 if torch.cuda.is_available() else 4
    part = tokens * element / (length * 2 * divisor)
    return question.run.replace(
        model={"name": folder, "random_weights": True, "dtype": "auto", "bits": None},
        data={"seq_len": tokens},
        options={
            "chunk": min(65_536, tokens // 4), "disk": folder,
            "host_memory": int(claim["plan"]["host"]["by_category"]["checkpoints"] * part),
        },
        engine={"world_size": 1, "sp": 1, **({"zero_stage": 0} if question.run.model.lora else {})},
        optim={"steps": 2},
    )  # fmt: skip


def input_bytes(run: RunConfig) -> int:
    """Bytes of one layer's input of such a run."""
    return run.data.seq_len * read_shape(run.model.name).width * (2 if torch.cuda.is_available() else 4)


def planned(run: RunConfig) -> dict[str, int]:
    """Bytes of a run on this machine, as the planner has them."""
    machine = machine_of(run, 1, min(1, torch.cuda.device_count()))
    found = as_metrics(foretell(run, machine)[1], machine)
    return {where: found[name] for where, name in SIZES.items()}


def measured(run: RunConfig) -> dict[str, int]:
    """The same of two steps of training in this process: all weights under DeepSpeed, an adapter without an engine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = whole_model(run, device.type).to(device)
    with ExitStack() as stack:
        handle = stack.enter_context(alstlib.apply(model, None, run.options))
        hosted: Iterable[torch.Tensor] = ()
        if run.model.lora is None:
            stack.enter_context(redirect_stdout(io.StringIO()))  # what DeepSpeed says
            stack.enter_context(redirect_stderr(io.StringIO()))
            stack.enter_context(mock.patch.dict(os.environ, LOCAL_RANK="0"))
            backend = dist.get_default_backend_for_device(device)
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
            model = initialize(run, model, run.bf16(device.type == "cuda"))
            hosted = host_tensors(model, run)
        else:
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
        ledger = stack.enter_context(Ledger(device, [handle.store]))
        ledger.mark_host(hosted)
        ledger.start()  # the peak is that of the steps, without what is the host's
        for _ in range(run.optim.steps):
            with device:
                batch = shard_of(handle.ctx, run.data.seq_len)
            loss = alstlib.causal_lm_loss(model, batch).loss
            if run.model.lora is None:
                model.backward(loss)
                take_step(model)
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            del loss
        return {"device": ledger.device_peak, "host": ledger.host_peak, "disk": handle.store.file.peak}


def length_here(claim: Mapping[str, Any], folder: str, seconds: float = 60) -> tuple[int, int]:
    """Tokens and a divisor for this machine: on a CPU those of a small run; on a GPU the longest of the claim's length
    halved whose step is planned to fit and to take at most so many `seconds`, of a model that is as wide as fits."""
    if not torch.cuda.is_available():
        return 2048, 32
    for divisor, halved in itertools.product((1, 2, 4, 8, 16), range(7)):
        run = smaller(claim, folder, tokens := 1_000_000 >> halved, divisor)
        found = foretell(run, machine_of(run, 1, 1))[1]
        if found.fits and found.seconds["step"] <= seconds:
            return tokens, divisor
    raise ValueError("no length fits this GPU")


def main() -> None:
    made: dict[str, Any] = {"mode": "predicted, and simulated", "made_by": "python notebooks/one_gpu.py", "claims": {}}
    for name, command in CLAIMS.items():
        question, tokens = asked(command)
        found = question.at(tokens)
        made["claims"][name] = claim = {"command": command, "plan": found.to_dict()}
        claim["simulated"] = simulated(claim)
        print(name, found.device_peak, found.host_peak, found.activations.disk, flush=True)
    FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
