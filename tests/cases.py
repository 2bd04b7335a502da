"""Small models, batches, engines, and the plain single-process run that distributed cases are compared with."""

from __future__ import annotations

import contextlib
import copy
import ipaddress
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, PreTrainedModel, Qwen3Config

import alstlib
from alstlib import sizing
from alstlib.config import RunConfig
from alstlib.data.shard import shard_batch
from alstlib.offload.ledger import Ledger
from alstlib.runs import processes

VOCAB = 96


def config(kind: str = "gqa", **overrides: Any) -> Any:
    heads, kv = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1), "wide": (8, 2)}.get(kind, (4, 2))
    common = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
              "num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": 512,
              "tie_word_embeddings": False}  # fmt: skip
    if kind == "qwen3":
        return Qwen3Config(**{**common, "head_dim": 8, **overrides})
    if kind == "gpt2":
        return GPT2Config(**{"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512,
                             "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **overrides})  # fmt: skip
    if kind == "gemma2":
        return Gemma2Config(**{**common, "head_dim": 8, "attn_logit_softcapping": None, "sliding_window": 4096,
                               "final_logit_softcapping": 5.0, **overrides})  # fmt: skip
    return LlamaConfig(**{**common, **overrides})


def make_model(
    kind: str = "gqa", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(kind, **overrides)).to(dtype)
    with torch.no_grad():  # transformers' init is near zero: make every gradient count
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.train()


def make_samples(
    count: int, length: int = 32, batch: int = 1, seed: int = 0, masked: bool = True
) -> list[dict[str, Tensor]]:
    """Unsharded samples with unequal numbers of valid tokens."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        ids = torch.randint(0, VOCAB, (batch, length), generator=g)
        labels = ids.clone()
        if masked:
            labels[:, : 3 + 5 * i % (length - 8)] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def each_document(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """The documents of a sample of one row that says their lengths, each a sample of its own; or the sample."""
    if "document_lengths" not in sample:
        return [sample]
    ids, labels = (sample[name].split(sample["document_lengths"][0], 1) for name in ("input_ids", "labels"))
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels)]


def plain_run(
    model: PreTrainedModel, samples: list[dict[str, Tensor]], scale: float = 1.0
) -> tuple[float, dict[str, Tensor]]:
    """Loss (mean over all valid tokens of all samples) and gradients of plain transformers on one process."""
    model = copy.deepcopy(model)
    samples = [part for sample in samples for part in each_document(sample)]
    shifted = [torch.nn.functional.pad(s["labels"][:, 1:], (0, 1), value=-100) for s in samples]
    tokens = max(1, sum(int((y != -100).sum()) for y in shifted))
    total = 0.0
    for sample, y in zip(samples, shifted):
        logits = model(sample["input_ids"], position_ids=sample.get("position_ids"), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum") / tokens
        (loss * scale).backward()
        total += loss.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def batch(
    length: int = 20, documents: Sequence[int] = (), rows: int = 1, world: int = 1, rank: int = 0, vocab: int = VOCAB
) -> dict[str, Tensor]:
    """A rank's slice of samples with every label, whole or packed of documents of these lengths."""
    ids = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(0))
    lengths = [list(documents or [length])] * rows
    return shard_batch({"input_ids": ids, "labels": ids, "document_lengths": lengths}, world, rank)  # type: ignore[return-value]


def train(model: Any, batch: dict[str, Any], ctx: alstlib.SPContext | None = None) -> Any:
    """Forward and backward of an attached model; returns what the loss function does."""
    out = alstlib.causal_lm_loss(model, batch, ctx)
    out.loss.backward()
    return out


def step(
    model: Any, batch: dict[str, Any], ctx: alstlib.SPContext | None = None, seed: int = 0
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of an attached model, whose dropout this seed draws; gradients are averaged over its ranks."""
    torch.manual_seed(seed)
    model.zero_grad()
    out = train(model, batch, ctx)
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for grad in found.values() if ctx is not None and ctx.sp > 1 else ():
        torch.distributed.all_reduce(grad.div_(ctx.sp))  # type: ignore[union-attr]
    return out.mean.item(), found


def peak(model: Any, batch: dict[str, Any], **options: Any) -> int:
    """Device bytes that the third step of an attached model takes at most, besides what is there before it."""
    with alstlib.apply(model, None, alstlib.Options(**options)) as handle, Ledger("cpu", [handle.store]) as ledger:
        ledger.mark_host(())
        for _ in range(3):
            model.zero_grad()
            ledger.start()
            start = ledger.device_bytes
            train(model, batch)
        return ledger.device_peak - start


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether gradients are the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def slopes(model: PreTrainedModel, batch: dict[str, Tensor], block: int | None = None) -> tuple[float, float]:
    """The derivative of an attached fp64 model's loss along one random direction of its weights, with the seed of its
    dropout fixed: from the gradients, and as a central difference. With a `block`, block by block."""
    torch.manual_seed(1)
    direction = [torch.randn_like(p) for p in model.parameters()]

    @torch.no_grad()
    def move(t: float) -> None:
        for p, d in zip(model.parameters(), direction):
            p.add_(d, alpha=t)

    def loss() -> Tensor:
        torch.manual_seed(7)
        if block is not None:
            return alstlib.block_step(model, batch, block=block).loss
        return alstlib.causal_lm_loss(model, batch).loss

    def loss_at(t: float) -> float:
        move(t)
        value = loss().item()
        move(-t)
        return value

    model.zero_grad()
    first = loss()
    if first.requires_grad:
        first.backward()
    slope = sum(float((p.grad * d).sum()) for p, d in zip(model.parameters(), direction))  # type: ignore[operator]
    return slope, (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6


@contextlib.contextmanager
def small_pages(keys: int = 1) -> Iterator[None]:
    """Pages of so many keys or a chunk, however short that is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "LEAST_KEYS", keys)
        yield


def worst_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """Largest error of a gradient relative to its norm; names must agree. The floor is 1e-6 of the largest norm."""
    assert set(got) == set(want), set(got) ^ set(want)
    floor = max(float(w.norm()) for w in want.values()) * 1e-6
    errors = {n: float((got[n].double() - w.double()).norm()) / max(float(w.norm()), floor) for n, w in want.items()}
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def wrap(model: Any, kind: str, world: int, run: RunConfig) -> Any:
    """The model in an engine: `ddp`, `fsdp2`, or DeepSpeed at the stage of the run."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from alstlib.train.engine import initialize

    return initialize(run, model, False)


def wait_for(condition: Callable[[], bool], seconds: float = 200) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


READS_PROC = sys.platform.startswith("linux") and sys.byteorder == "little"


def listening(out: Path) -> dict[int, set[str]]:
    """Addresses on which each process of the newest attempt in `out` listens (TCP) or receives (UDP), from /proc."""
    run = max((out / "logs").iterdir(), key=lambda p: p.stat().st_mtime).name
    tables: dict[str, str] = {}
    for kind, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            words = bytes.fromhex(fields[1].partition(":")[0])
            words = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
            if fields[3] == state:
                tables[f"socket:[{fields[9]}]"] = str(ipaddress.ip_address(words))
    found: dict[int, set[str]] = {}
    for pid in processes.processes(run):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError, KeyError):
                    address = tables[os.readlink(f"/proc/{pid}/fd/{name}")]
                    found.setdefault(pid, set()).add(address)
    return found


def whole_state(engine: Any) -> dict[str, Tensor]:
    """fp32 weights and AdamW's moments of an engine, whole, from what each rank would save of them (a collective)."""
    from alstlib.train.pieces import HeldState

    held, values = HeldState(engine), {}
    for name in held.names():
        start, piece = held.own(name)
        values[name] = torch.zeros(held.size(name))
        values[name][start : start + len(piece)] = piece
        torch.distributed.all_reduce(values[name])
    return values
