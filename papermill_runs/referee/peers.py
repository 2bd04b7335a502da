"""The worker that compares training programs: `peers.py --config config.json --out DIR`.

Every stack of the run's `peers` (`baselines`) is built from the same weights and given the same sample, in processes of
its own: stacks that share a process slow each other down. Only one stack is there at a time. In the first round each in
turn is started, looked at (memory, counts, gradients) and timed; the second round starts and times each again, so that
a machine whose speed changes treats all alike. Both together take the times of `steps` steps. With `search` a job finds
each stack's longest sequence in an equal budget instead (`device_memory`, over what is there at the start of a step).
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from baselines import Stack, check_stacks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alstlib.base.config import RunConfig
from alstlib.base.mesh import from_all
from alstlib.base.reference import relative_error
from alstlib.base.sizing import heads_of
from alstlib.base.units import format_bytes
from alstlib.hf.loading import models
from alstlib.hf.loading.models import flop_dimensions, load_model, model_config
from alstlib.kernels.attention import attention_backward, attention_forward
from alstlib.kernels.backends import choose_backend
from alstlib.kernels.rule import Attended, Rule
from alstlib.offload.host_store import HostStore
from alstlib.planner.measure.ledger import Ledger
from alstlib.planner.search import longest_that_fits
from alstlib.runs.train.worker import LONGEST_SECONDS, Job, begin, join, run_worker, timed

EXACT_LENGTH = 512
"""Tokens of the sample on which gradients are compared with the oracle."""
ROUNDS = 2
"""Launches of each stack, where there are as many steps to time."""


class Counts(TorchDispatchMode):
    """Counts what passes PyTorch's dispatcher, where every stack's kernels and collectives do: attention's forward
    work, and the bytes that this rank sends to others."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = 0
        """Pairs of query and key that attention's forward kernels were given, summed over the heads of this rank."""
        self.sent: Counter[str] = Counter()
        """Bytes sent: `exchange` (all-to-alls, and gathers of integers, which are positions) and `other` (ZeRO's
        gathers of weights and reductions of gradients, and sums over the ranks)."""
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            self._collective(name, args)
        elif "all_to_all" in name:  # a stack's own operator around the collective, which is not seen inside it
            self._collective("alltoall", args)
        elif "attention" in name and "backward" not in name and len(args) > 2 and args[0].ndim == 4:
            given = {a.name: v for a, v in zip(func._schema.arguments, args)} | (kwargs or {})
            q, k = args[0], args[1]
            at = 1 if "_flash_attention_forward" in name else 2
            rows, keys, heads = q.shape[at], k.shape[at], q.shape[3 - at]
            causal = given.get("is_causal", False)
            self.pairs += heads * q.shape[0] * (rows * (rows + 1) // 2 if causal else rows * keys)
        return func(*args, **(kwargs or {}))

    def _collective(self, name: str, args: Any) -> None:
        tensors = [_tensors(a) for a in args[:2]]
        given = tensors[-1] or tensors[0]  # (outputs, inputs, ...) or (tensors, ...)
        ranks, nbytes = dist.get_world_size(), sum(t.nbytes for t in given)
        share = nbytes * (ranks - 1) // ranks
        if "alltoall" in name or "reduce_scatter" in name:
            sent = share
        elif "gather" in name:
            sent = nbytes * (ranks - 1)
        elif "allreduce" in name:
            sent = 2 * share
        else:
            sent = 0 if "barrier" in name or ranks == 1 else nbytes
        positions = "gather" in name and not given[0].is_floating_point() and given[0].numel() > 1
        kind = "exchange" if "alltoall" in name or positions else "other"
        self.sent[kind] += sent
        self.calls[kind] += 1


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def peak_over_start(step: Callable[[], Any], device: torch.device, stores: Sequence[HostStore] = ()) -> int:
    """Largest number of live bytes over those at the start, by the device's allocator or the ledger's count
    of storages.

    Not by the profiler's allocation events on a CPU: it misses what gloo's threads release, which adds tens of MiB, in
    one step more than in the next.
    """
    with Ledger(device, stores) as ledger:
        start = ledger.device_bytes
        step()
        return ledger.device_peak - start


class Alone(Job):
    """One rank of one stack, in a process that holds nothing else."""

    def __init__(self, name: str, run: RunConfig, out: Path) -> None:
        super().__init__(run, out)
        self.say(f"building {name}")
        self.stack = Stack(name, run, self.device, self.bf16)
        self.pids = from_all(os.getpid())

    def sample(self, length: int) -> dict[str, Tensor]:
        """Random tokens [1, S], the same on every rank."""
        generator = torch.Generator().manual_seed(self.run.optim.seed)
        ids = torch.randint(0, self.stack.model.config.vocab_size, (1, length), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    # ----- time, memory, counts

    def time(self, steps: int, look: bool) -> tuple[dict[str, Any], list[float], list[int]]:
        """What a step needs (with `look`), the seconds of `steps` steps, and the processes of the stack's ranks."""
        sample, where = self.sample(self.run.data.seq_len), f"{self.stack.name} at {self.run.data.seq_len:,} tokens"
        self.say(f"{where}: {'memory and counts' if look else 'a step to warm up'}")
        found = {"loss": self.stack.step(sample)}  # not timed
        if look:
            found |= self.look(sample)
        self.say(f"{where}: {steps} steps that are timed")
        return found, [timed(lambda: self.stack.step(sample), self.device) for _ in range(steps)], self.pids

    def look(self, sample: dict[str, Tensor]) -> dict[str, Any]:
        """What a step needs, in steps that are not timed. Memory last: ZeRO-3's prefetching settles after about three
        steps."""
        stack, world = self.stack, dist.get_world_size()
        stack.step(sample)
        rows = [0]
        handles = [
            m.register_forward_hook(lambda m, args, out: rows.__setitem__(0, rows[0] + out.shape[:-1].numel()))
            for name, m in stack.model.named_modules()
            if name.endswith("mlp.gate_proj")  # a hook at down_proj would have our tiles compute it
        ]
        with Counts() as counts:
            stack.step(sample)
        for handle in handles:
            handle.remove()
        errors = {} if self.run.engine.offload_params else self.gradient_error()
        peaks = from_all([self.peak(sample), stack.host_bytes()])
        config, length = stack.model.config, sample["input_ids"].shape[1]
        layers = config.num_hidden_layers
        whole = stack.sequences * layers * config.num_attention_heads * length * (length + 1) // 2 / world
        return {
            "device_peak_bytes": [p for p, _ in peaks],
            "host_peak_bytes": [h for _, h in peaks],
            "wire_bytes": counts.sent["exchange"],
            "exchanges": counts.calls["exchange"],
            "other_wire_bytes": counts.sent["other"],
            "attention_forwards": counts.pairs / whole,
            "mlp_forwards": rows[0] * world / (stack.sequences * length * layers),
            **errors,
            "sequences": stack.sequences,
            "notes": stack.notes,
        }

    def peak(self, sample: dict[str, Tensor]) -> int:
        return peak_over_start(lambda: self.stack.step(sample), self.device, self.stack.stores)

    # ----- gradients

    def oracle(self) -> dict[str, Tensor]:
        """Gradients of plain transformers in fp32, unsharded, of a short sample."""
        model: Any = load_model(self.run, torch.float32)
        model.set_attn_implementation("eager")
        sample = self.sample(EXACT_LENGTH)
        model(input_ids=sample["input_ids"], labels=sample["labels"], use_cache=False).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def gradient_error(self) -> dict[str, Any]:
        """Errors of the gradients relative to their norms: the largest, whose it is, and the median."""
        from deepspeed.utils import safe_get_full_grad

        stack, exact = self.stack, self.oracle()
        loss, _ = stack.loss(self.sample(EXACT_LENGTH))
        stack.engine.backward(loss)
        errors = {}
        for name, p in stack.model.named_parameters():
            grad = safe_get_full_grad(p)
            errors[name] = relative_error(grad.cpu(), exact[name]) if grad is not None else float("inf")
        stack.engine.step()
        worst = max(errors, key=errors.__getitem__)
        median = statistics.median(errors.values())
        return {"gradient_error": errors[worst], "gradient_worst": worst, "gradient_error_median": median}

    # ----- the longest sequence

    def longest(self) -> dict[str, Any]:
        run, stack = self.run, self.stack
        assert run.limits.device_memory is not None
        assert run.search is not None
        for _ in range(3):
            stack.step(self.sample(run.search.granule))

        def peak(length: int) -> int:
            sample = self.sample(length)
            most = max(from_all(self.peak(sample)))
            self.say(f"{stack.name} at {length:,} tokens peaks {format_bytes(most)} over its start")
            return most

        budget, granule = run.limits.device_memory, run.search.granule
        try:
            found = longest_that_fits(peak, budget, granule, start=run.data.seq_len, limit=run.search.max)
        except MemoryError as e:  # not even one granule: a finding about this stack, not the end of the others
            return {"seq_len": 0, "tried": [], "host_peak_bytes": stack.host_bytes(), "why": str(e)}
        tried = [{"seq_len": n, "device_peak_bytes": p} for n, p in found.tried]
        return {"seq_len": found.length, "tried": tried, "host_peak_bytes": stack.host_bytes()}


_stack: list[Alone] = []
"""The stack of this process, where it is one that `Comparison` started."""


def _build(group: str, name: str, run: RunConfig, out: Path) -> None:
    join(begin(), LONGEST_SECONDS, group)
    _stack.append(Alone(name, run, out))


def _call(method: str, *args: Any) -> Any:
    return getattr(_stack[0], method)(*args)


class Comparison(Job):
    """One rank of the job. It starts a process for each stack, which joins those of the other ranks."""

    def __init__(self, run: RunConfig, out: Path) -> None:
        super().__init__(run, out)
        check_stacks(run)
        if run.search and run.limits.device_memory is None:
            raise ValueError("search=True needs device_memory: the budget over what is there at the start of a step")
        # On a CPU, processes are forked from one that has imported what they need. CUDA does not live through a fork.
        self.processes: Any = multiprocessing.get_context("spawn" if self.gpu else "forkserver")
        if not self.gpu:
            self.processes.set_forkserver_preload(["deepspeed", "alstlib.runs.train.worker"])
        self.started = 0

    @contextmanager
    def alone(self, name: str) -> Iterator[Callable[..., Any]]:
        """Start a stack in processes of its own, which end with this block. What it yields calls a method of `Alone`
        there."""
        self.started += 1
        with ProcessPoolExecutor(1, self.processes) as process:
            process.submit(_build, str(self.started), name, self.run, self.out).result()
            yield lambda method, *args: process.submit(_call, method, *args).result()

    def __call__(self) -> dict[str, Any]:
        return self.longest() if self.run.search else self.compare()

    def compare(self) -> dict[str, Any]:
        run, length = self.run, self.run.data.seq_len
        made: dict[str, dict[str, Any]] = {name: {"step_seconds": [], "processes": []} for name in run.peers}
        took: dict[str, float] = {}
        rounds = min(ROUNDS, run.optim.steps)
        for i in range(rounds):
            for at, name in enumerate(run.peers):
                began, left = time.perf_counter(), [took[n] for n in run.peers[at:] if n in took]
                eta = {"eta_seconds": sum(left)} if left else {}
                self.say(f"{name} at {length:,} tokens, round {i + 1} of {rounds}", **eta)
                with self.alone(name) as ask:
                    found, seconds, pids = ask("time", (run.optim.steps + i) // rounds, i == 0)
                took[name] = time.perf_counter() - began
                made[name] = found | made[name]
                made[name]["step_seconds"] += seconds
                made[name]["processes"].append(pids)
        for one in made.values():
            one["tokens_per_second"] = length * one["sequences"] / statistics.median(one["step_seconds"])
        config = model_config(run.model.name, run.model.config, run.model.trust_remote_code)
        floor_of = floor_step(config, length, dist.get_world_size(), self.device, self.bf16)
        floor = [timed(floor_of, self.device) for _ in range(3)]
        first = made[run.peers[0]]
        flos = models.flos(length, length, **self.flops())
        return {
            "seq_len": length,
            "tokens_per_step": length,
            "step_seconds": first["step_seconds"],
            "loss": [first["loss"]],
            "device_peak_bytes": first["device_peak_bytes"],
            "host_peak_bytes": first["host_peak_bytes"],
            "wire_bytes": first["wire_bytes"],
            "flos": flos,
            "floor_seconds": floor,
            "peers": made,
        }

    def flops(self) -> dict[str, Any]:
        with torch.device("meta"):
            return flop_dimensions(load_model(self.run, torch.float32))

    def longest(self) -> dict[str, Any]:
        made = {}
        for name in self.run.peers:
            with self.alone(name) as ask:
                made[name] = ask("longest")
        first = made[self.run.peers[0]]
        return {"seq_len": first["seq_len"], "tried": first["tried"], "peers": made}


def floor_step(config: Any, length: int, ranks: int, device: torch.device, bf16: bool) -> Callable[[], None]:
    """The kernels alone: what a step of one rank must compute under checkpointing, called bare on random numbers.

    Attention forward once and backward once on whole sequences of this rank's heads; every matrix product of a layer
    forward twice (once more to recompute; the last of the MLP, whose output nobody reads again, once) and its two
    backward products; the head forward once, with both backward products. No norms, no activations, no exchange, no
    optimizer.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    (heads, kv, dim), width = heads_of(config), config.hidden_size

    def make(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    q, dout = (make(1, heads // ranks, length, dim) for _ in range(2))
    k, v = (make(1, max(1, kv // ranks), length, dim) for _ in range(2))
    backend = choose_backend("sdpa", device, dtype, dim)
    inner = config.intermediate_size
    twice = [(width, heads * dim), (width, kv * dim), (width, kv * dim), (heads * dim, width)]
    twice += [(width, inner), (width, inner)]
    rows = length // ranks

    def products(sizes: Sequence[tuple[int, int]], forwards: int) -> None:
        for a, b in sizes:
            x, w, grad = make(rows, a), make(b, a), make(rows, b)
            for _ in range(forwards):
                x @ w.T
            grad @ w
            grad.T @ x

    def step() -> None:
        for _ in range(config.num_hidden_layers):
            out, lse = attention_forward(backend, q, k, v, rule=Rule(dim**-0.5))
            attention_backward(backend, dout, Attended(q, k, v, out, lse), rule=Rule(dim**-0.5))
            products(twice, 2)
            products([(inner, width)], 1)
        tile = 512
        x, w = make(tile, width), make(config.vocab_size, width)
        for _ in range(-(-rows // tile)):
            logits = x @ w.T
            logits @ w
            logits.T @ x

    return step


def main() -> None:
    run_worker(__doc__, Comparison)


if __name__ == "__main__":
    main()
