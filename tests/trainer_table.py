"""Who is right under a Trainer? The same cases with TrainerMixin and with the libraries' own sequence parallelism
(Accelerate's `ParallelismConfig(sp_backend="deepspeed")`), each compared with the plain Trainer in one process.

`python tests/trainer_table.py` runs them and writes papermill_runs/results/trainer/table.json and its table in
notebooks/training.md; `tests/test_repository.py` holds the table against the result.
"""

import json
import re
import tempfile
from functools import partial
from importlib import metadata

import torch
from conftest import RankPool
from support_table import ROOT, put_between
from trainers import collate, errors, train, with_positions
from transformers import MistralConfig

RESULT = ROOT / "papermill_runs" / "results" / "trainer" / "table.json"
ENGINE = "zero2"  # one that both have
BOUND = 1e-5
WORDS = {"loss": "loss", "eval_loss": "evaluation loss", "grad_norm": "gradient norm", "weights": "weights"}


def even(count=43):
    """Samples of 40 tokens, all with labels."""
    g = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 96, (40,), generator=g).tolist() for _ in range(count)]
    return [{"input_ids": ids, "labels": list(ids)} for ids in rows]


def prompts(count=43):
    """Samples of 40 tokens, of which 1 to 36 at the beginning have no label."""
    return [
        {**s, "labels": [-100] * (1 + 5 * i % 36) + s["labels"][1 + 5 * i % 36 :]} for i, s in enumerate(even(count))
    ]


def pack(batch):
    """Each sample as two documents of 16 and 24 tokens."""
    made = collate(batch)
    positions = torch.cat([torch.arange(16), torch.arange(24)]).expand(len(batch), -1).contiguous()
    made["labels"][:, 16] = -100  # nobody's next token
    del made["attention_mask"]
    return {**made, "position_ids": positions}


WINDOW = MistralConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, sliding_window=8, initializer_range=0.2,
)  # fmt: skip
CASES = {
    "samples of one length, every token with a label": {"data": even()},
    "samples of unequal lengths": {"collators": (collate, partial(with_positions, to=None))},
    "prompts without labels": {"data": prompts()},
    "a micro-batch without labels": {},
    "evaluation": {"data": even(), "evaluate": True, "eval_strategy": "steps", "eval_steps": 5},
    "LoRA": {"data": even(), "lora": True},
    "packed documents": {"data": even(), "collators": (pack, pack)},
    "sliding window": {"data": even(), "kind": WINDOW},
    "label smoothing": {"data": even(), "label_smoothing_factor": 0.1},
    "resume in the middle of an epoch": {"data": even(9), "save_strategy": "steps", "save_steps": 7},
}


def run(rank, world, how, case, folder, resume):
    """A run, or the message with which it ended."""
    settings = {"max_steps": 20, "count": 43, **CASES[case]}
    ours, theirs = settings.pop("collators", (None, None))
    settings["collator"] = theirs if how == "library" else ours
    if resume:
        settings |= {"resume": f"{folder}/checkpoint-7", "save_strategy": "no"}
    engine = "ddp" if how == "plain" else ENGINE
    try:
        # a larger epsilon than AdamW's own: rounding of gradients near zero would decide what the weights become
        return train(rank, world, how, engine, folder=folder, dtype=torch.float32, adam_epsilon=1e-6, **settings)
    except Exception as e:
        if how == "plain":
            raise
        return f"{type(e).__name__}: {e}"


def outcome(pool, how, case):
    """The largest relative errors of a way to run a case, or its message."""
    resumed = case.startswith("resume")
    with tempfile.TemporaryDirectory() as folder:
        want = run(0, 1, "plain", case, f"{folder}/plain", False)
        for resume in (False, True) if resumed else (False,):
            try:
                got = pool(run, how, case, f"{folder}/{how}", resume, timeout=100)[0]
            except Exception as e:  # a rank that hangs or dies
                got = f"{type(e).__name__}: {e}"
            if how == "library":
                pool.stop()  # its groups and its attention stay in a process
            if isinstance(got, str):
                line = next((part.strip() for part in got.splitlines() if part.strip()), "")
                return {"error": re.sub(r"/\S+/", "", line)[:200]}
        return {"errors": errors(got, want, after=7 if resumed else 0)}


def measure():
    found = {case: {} for case in CASES}
    pool = RankPool(2)
    for how in ("ours", "library"):
        for case in CASES:
            found[case][how] = outcome(pool, how, case)
            print(f"{how:8} {case:50} {found[case][how]}", flush=True)
    pool.stop()
    versions = {
        name: metadata.version(name) for name in ("transformers", "accelerate", "trl", "peft", "deepspeed", "torch")
    }
    return {"engine": ENGINE, "ranks": 2, "versions": versions, "cases": found}


def cell(found):
    if "error" in found:
        return f"ends: `{found['error'].partition(' (')[0]}`"
    wrong = {name: found["errors"][name] for name in WORDS if found["errors"].get(name, 0.0) > BOUND}
    if not wrong:
        return f"{max(found['errors'].values()):.0e}"
    shown = {n: f"{error:.0e}" if error < 1e-3 else f"{error:.1%}" for n, error in wrong.items()}
    return "off: " + ", ".join(f"{WORDS[n]} {text}" for n, text in shown.items())


def table():
    result = json.loads(RESULT.read_text())
    lines = ["| case | TrainerMixin | Accelerate's own |", "| --- | --- | --- |"]
    lines += [f"| {case} | {cell(f['ours'])} | {cell(f['library'])} |" for case, f in result["cases"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(measure(), indent=1) + "\n")
    put_between("<!-- trainer -->\n", "<!-- /trainer -->", table())
