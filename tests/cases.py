"""Small models, batches, engines, and the plain single-process run that distributed cases are compared with."""

import contextlib
import copy
import functools
import gc
import json
import math
import os
import re
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import transformers
import yaml
from torch import nn
from zoo import ZOO, trainable

import alstlib
from alstlib.base import sizing
from alstlib.base.config import RunConfig
from alstlib.base.reference import shift
from alstlib.data.shard import shard_batch
from alstlib.planner.measure.ledger import Ledger
from alstlib.planner.measure.verify import errors_of
from alstlib.runs.processes import RUN_ID_VARIABLE
from alstlib.ulysses.head_layouts import WholeHeads

VOCAB = 96
ROOT = Path(__file__).resolve().parents[1]


def text_of(path):
    """The text of a file, from the top folder on."""
    return (ROOT / path).read_text(encoding="utf-8")


def cells_of(notebook):
    return json.loads(text_of(notebook))["cells"]


def by_own_names(fields):
    """Fields of a run that may be named without their group: `{"seq_len": 4}` for `{"data.seq_len": 4}`."""
    return {RunConfig.elsewhere().get(name, name): value for name, value in fields.items()}


def run_with(defaults, changes):
    """A run with the fields of a text in YAML, and with these in their place or besides them."""
    return RunConfig.from_dict(by_own_names({**yaml.safe_load(defaults), **changes}))


def config(kind="gqa", **overrides):
    name, fields = ZOO["SMALL"].get(kind, ZOO["SMALL"]["gqa"])
    return getattr(transformers, name)(**{**fields, **overrides})


def make_model(kind="gqa", seed=0, dtype=torch.float32, **overrides):
    return trainable(config(kind, **overrides), dtype, seed)


def make_samples(count, length=32, batch=1, seed=0):
    """Unsharded samples with unequal numbers of valid tokens."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        ids = torch.randint(0, VOCAB, (batch, length), generator=g)
        labels = ids.clone()
        labels[:, : 3 + 5 * i % (length - 8)] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def each_document(sample):
    """The documents of all rows of a sample that says their lengths, each a sample of its own; or the sample."""
    if "document_lengths" not in sample:
        return [sample]
    rows = zip(sample["input_ids"], sample["labels"], sample["document_lengths"])
    return [
        {"input_ids": ids[None], "labels": labels[None]}
        for row, labels_of_row, lengths in rows
        for ids, labels in zip(row.split(lengths), labels_of_row.split(lengths))
    ]


def plain_run(model, samples):
    """The oracle: plain transformers on one process, document by document: loss and gradients of the mean over all
    labels of all samples and, of routers, the balance over all documents of a sample by its share of the labels."""
    model, total = copy.deepcopy(model), torch.zeros((), dtype=torch.float64)
    samples, config = [[*map(labelled, each_document(sample))] for sample in samples], model.config
    counts = [sum(int((labels != -100).sum()) for _, labels in parts) for parts in samples]
    for parts, count in zip(samples, counts):
        routed = []
        for given, labels in parts:
            out = model(**given, use_cache=False)
            logits = out.logits.to(torch.promote_types(out.logits.dtype, torch.float32)).flatten(0, 1)
            total = total + nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
            routed += [out.router_logits] if getattr(config, "output_router_logits", False) else []
        if routed:
            from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

            experts = getattr(config, "num_local_experts", None) or config.num_experts
            joined = tuple(torch.cat(parts) for parts in zip(*routed))
            balance = load_balancing_loss_func(joined, experts, config.num_experts_per_tok)
            total = total + config.router_aux_loss_coef * balance * count
    total = total / max(1, sum(counts))
    total.backward()
    return total.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def labelled(document):
    """What a model is given of a document, and its labels, shifted."""
    labels = document["shift_labels"] if "shift_labels" in document else shift(document["labels"])
    return {n: t for n, t in document.items() if n in ("input_ids", "position_ids")}, labels


ALL_ON = {"tiles": {"mlp": 5, "loss": 7, "norm": 6}, "offload": True, "save_attention": True}  # fmt: skip
ALL_OFF = {"tiles": False, "checkpoint": False}


def tokens_of(length, rows=1, seed=0):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def sample_of(length, rows=1, seed=5, documents=None, ignored=slice(0)):
    """An unsharded sample of so many rows, with the lengths of its documents; some labels do not count."""
    ids = tokens_of(length, rows, seed)
    labels = ids.clone()
    labels[:, ignored] = -100
    return {"input_ids": ids, "labels": labels, **({"document_lengths": [documents] * rows} if documents else {})}


def batch_of(length, seed=0, ignored=slice(0)):
    """A whole batch of one rank, of one document."""
    ids = tokens_of(length, 1, seed)
    labels = shift(ids)
    labels[:, ignored] = -100
    return {"input_ids": ids, "position_ids": torch.arange(length)[None], "shift_labels": labels}


def attach(model, ctx=None, **options):
    return alstlib.apply(model, ctx, alstlib.Options(**options))


def freeze(model, parts):
    """Freeze the weights whose names have one of these parts, and no others."""
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in parts))


def decoder_layers(model):
    return model.base_model.h if hasattr(model.base_model, "h") else model.base_model.layers


def count_tokens(modules):
    """Tokens that each of these modules makes an output for, added up while the model runs."""
    tokens = [0] * len(modules)
    for i, module in enumerate(modules):

        def count(module, args, out, i=i):
            tokens[i] += out.shape[1]

        module.register_forward_hook(count)
    return tokens


def mlp_tokens(model):
    """Tokens through the MLP of each layer."""
    return count_tokens([layer.mlp for layer in decoder_layers(model)])


def gradients(model, world=1):
    """Copies of every gradient; of several ranks their average, which an engine makes."""
    of = {n: p for n, p in model.named_parameters() if p.grad is not None or (world > 1 and p.requires_grad)}
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in of.items()}
    for grad in found.values() if world > 1 else ():
        torch.distributed.all_reduce(grad)
        grad /= world
    return found


def step(
    model, batch, ctx = None, block = None,
    seed = None,
):  # fmt: skip
    """A step of an attached model, whole or block by block; of a sample, that of this rank's slice."""
    model.zero_grad()
    if seed is not None:
        torch.manual_seed(seed)
    if "shift_labels" not in batch:
        batch = shard_batch(batch, ctx.sp if ctx else 1, ctx.sp_rank if ctx else 0)
    if block:
        out = alstlib.block_step(model, batch, block)
    else:
        out = alstlib.causal_lm_loss(model, batch)
        out.loss.backward()
    return out.mean.item(), gradients(model, ctx.world_size if ctx else 1)


def own_step(model, of="loss", **given):
    """A step that calls the model itself, attached or not, with what a user gives it; of this part of its output."""
    model.zero_grad()
    loss = model(**given)[of]
    loss.backward()
    return loss.item(), gradients(model)


def plain_step(model, data, seed=None):
    """The same of plain transformers, from a sample or a whole batch."""
    if seed is not None:
        torch.manual_seed(seed)
    return plain_run(model, [data])


def with_lora(model, targets, **more):
    """The model in PEFT's, with adapters that are not zero."""
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **more)
    return peft.get_peft_model(model, config)


def check_step(got, want, loss=1e-6, gradient=1e-5):
    """Relative errors of the loss and of the worst gradient; one that only one has must be zero."""
    both = ((got[1], want[1]), (want[1], got[1]))
    error, name = worst_error(*({n: g for n, g in one.items() if n in other or g.any()} for one, other in both))
    assert abs(got[0] - want[0]) < loss * abs(want[0]), (got[0], want[0])
    assert error < gradient, (error, name)


def check_attached(model, data, steps=1, **options):
    """Steps of the model, attached with these options, are those of plain transformers; returns the handle."""
    want = plain_step(model, data)
    with attach(model, **options) as handle:
        for _ in range(steps):
            check_step(step(model, data), want)
    return handle


def check_refused(message, fn, *args, **kwargs):
    """A call is refused, with a message that has this pattern."""
    with pytest.raises(ValueError, match=message):
        fn(*args, **kwargs)


def check_refusals(table, names):
    """Check that each call in the table is refused with a message that has its pattern."""
    from operators import error_of

    for call, message in lines_of(table, " | "):
        assert re.search(message, error_of(eval, call, names)), call


def on_ranks(pools, world, fn, *args, **how):
    """The results of all ranks; of one rank, from this process."""
    run = functools.partial(fn, **how)
    return pools(world)(run, *args) if world > 1 else [run(0, 1, *args)]


def batch(length=20, documents=(), rows=1, world=1, rank=0, vocab=VOCAB):
    """A rank's slice of samples with every label, whole or packed of documents of these lengths."""
    ids = torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(0))
    lengths = [list(documents or [length])] * rows
    return shard_batch({"input_ids": ids, "labels": ids, "document_lengths": lengths}, world, rank)


def train(model, batch):
    """Forward and backward of an attached model; returns what the loss function does."""
    out = alstlib.causal_lm_loss(model, batch)
    out.loss.backward()
    return out


def peak(model, run, **options):
    """Device bytes that the third call of `run` with an attached model takes at most, besides what is there before it,
    and bytes on the host."""
    gc.collect()  # models of earlier tests, which would be freed in between
    with attach(model, **options) as handle, Ledger("cpu", [handle.store]) as ledger:
        ledger.mark_host(())
        for _ in range(3):
            model.zero_grad()
            ledger.start()
            start = ledger.device_bytes
            run(model)
        return ledger.device_peak - start, handle.store.peak_nbytes


def growth(short, long, build=make_model, block=None, **options):
    """Device bytes a token by which the peak of a step grows between two lengths of a sample."""

    def run(model, data):
        train(model, data) if block is None else alstlib.block_step(model, data, block)

    peaks = [
        peak(build(max_position_embeddings=512), functools.partial(run, data=batch(length)), **options)[0]
        for length in (short, long)
    ]
    return (peaks[1] - peaks[0]) / (long - short)


@contextlib.contextmanager
def no_gc():
    """Turn the garbage collector off inside the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def same(a, b):
    """Whether tensors are the same bits, in dicts or in sequences."""
    a, b = (dict(t if isinstance(t, dict) else enumerate(t)) for t in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def slopes(model, batch, block=None):
    """The derivative of an attached fp64 model's loss along one random direction of its weights, with the seed of its
    dropout fixed: from the gradients, and as a central difference. With a `block`, block by block."""
    torch.manual_seed(1)
    direction = [torch.randn_like(p) for p in model.parameters()]

    @torch.no_grad()
    def move(t):
        for p, d in zip(model.parameters(), direction):
            p.add_(d, alpha=t)

    def loss():
        torch.manual_seed(7)
        if block is not None:
            return alstlib.block_step(model, batch, block=block).loss
        return alstlib.causal_lm_loss(model, batch).loss

    def loss_at(t):
        move(t)
        value = loss().item()
        move(-t)
        return value

    model.zero_grad()
    first = loss()
    if first.requires_grad:
        first.backward()
    slope = sum(float((p.grad * d).sum()) for p, d in zip(model.parameters(), direction))
    return slope, (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6


def passes(patch, model):
    """Tokens through the MLP, the query's weights and the attention of each layer, added up while the model runs."""
    layers, now, kernel = decoder_layers(model), [0], WholeHeads.forward
    queries = [layer.attn.c_attn if hasattr(layer, "attn") else layer.self_attn.q_proj for layer in layers]
    found = {"mlp": mlp_tokens(model), "query": count_tokens(queries), "attention": [0] * len(layers)}
    for i, query in enumerate(queries):
        query.register_forward_hook(lambda *_, i=i: now.__setitem__(0, i))

    def attention_forward(*args, **kwargs):
        found["attention"][now[0]] += args[1].shape[2]
        return kernel(*args, **kwargs)

    patch.setattr(WholeHeads, "forward", staticmethod(attention_forward))
    return found


@contextlib.contextmanager
def small_pages(keys=1):
    """Pages of so many keys or a chunk, however short that is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "LEAST_KEYS", keys)
        yield


def worst_error(got, want):
    """Largest error of a gradient (`errors_of`), and whose it is; names must agree."""
    assert set(got) == set(want), set(got) ^ set(want)
    errors = errors_of(got, want)
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def wrap(model, kind, run):
    """The model in an engine: `ddp`, `fsdp2`, or DeepSpeed at the stage of the run."""
    if kind in ("ddp", "fsdp2"):
        from matrix import engine_of

        return engine_of(model, kind)
    from alstlib.runs.train.engine import initialize

    return initialize(run, model, False)


def lines_of(table, between=" -> "):
    """The lines of a table in a text, each cut into its cells."""
    return [tuple(cell.strip() for cell in line.split(between)) for line in table.strip().splitlines()]


def unsaid(text, lines):
    """Those of these lines that a text does not have."""
    return [line for line in lines.strip().splitlines() if line not in text]


def values_of(table):
    """The lines of such a table, with the value of each cell, which is YAML."""
    return [tuple(map(yaml.safe_load, line)) for line in lines_of(table)]


def make_file(path, text=""):
    """And the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def wait_for(condition, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


READS_PROC = sys.platform.startswith("linux") and sys.byteorder == "little"
reads_proc = pytest.mark.skipif(not READS_PROC, reason="reads Linux's /proc")


def living(value, variable=RUN_ID_VARIABLE):
    """The command lines of all other processes that were started with this value of an environment variable."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                found[process.pid] = " ".join(process.cmdline())[:120]
    return found


def listening(out):
    """Addresses on which each process of the newest attempt in `out` listens (TCP) or receives (UDP)."""
    run = max((out / "logs").iterdir(), key=lambda p: p.stat().st_mtime).name
    found = {}
    for pid in living(run):
        with contextlib.suppress(psutil.Error):
            for one in psutil.Process(pid).net_connections("inet"):
                if one.status == psutil.CONN_LISTEN or (one.type == socket.SOCK_DGRAM and not one.raddr):
                    found.setdefault(pid, set()).add(one.laddr.ip)
    return found


def whole_state(engine):
    """fp32 weights and AdamW's moments of an engine, whole, from what each rank would save of them (a collective)."""
    from alstlib.runs.train.pieces import HeldState

    values = {}
    for name, piece in HeldState(engine).pieces.items():
        values[name] = torch.zeros(math.prod(piece.whole))
        if not piece.shared or not torch.distributed.get_rank():
            values[name][piece.start : piece.start + len(piece.held)] = piece.held
        torch.distributed.all_reduce(values[name])
    return values
