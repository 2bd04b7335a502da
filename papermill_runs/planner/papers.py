"""What papers state, compared with what the planner predicts for their programs.

Nothing is fitted to these rows: the steps are simulated (`referee/reference_stack.py`), buckets are DeepSpeed's
defaults, the rest are the named terms of `machine.Overheads`. Where a prediction is off by more than 10%, `WHY` says
what may be behind it, as far as is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alstlib.base.config import PAPER_ROWS, Engine, Model, RunConfig, row_config
from alstlib.base.options import Options
from alstlib.base.units import GIB, format_seconds, format_tokens
from alstlib.planner.gpus import label_bytes, rates_of
from alstlib.planner.machine import Machine
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.prediction import longest, predict
from alstlib.planner.question import CHUNK, SPARSE, Question
from alstlib.planner.step_time import model_flops

FILE = Path("papermill_runs/results/planner/papers.json")
PAGE = Path("notebooks/what_fits.md")
HOST = 1_900_000_000_000
"""Bytes of a node of the ALST paper (section 5.3.2)."""
EIGHT_B = "meta-llama/Llama-3.1-8B"
SEVEN_B = "Qwen/Qwen2.5-7B"
BASE = RunConfig(model=Model(name=EIGHT_B, dtype="bf16"), options=Options.plain(attention="flash_attention_2"))
SEARCHED = (
    "what lies between the predicted peak and 79 GiB is not accounted for: the paper says that the last GiBs could not "
    "be used (a loss of NaN, footnote 17) and that NCCL takes 'multiple gigabytes'; Hugging Face's table has a "
    "constant of that size too"
)
MEGATRON = (
    "its Ulysses is Megatron-DeepSpeed's, with fused kernels of its own: on whole fp32 logits and norms, as traced "
    "here, the stated length cannot fit"
)
WHY: dict[str, str] = {
    "baseline": "lengths were tried in powers of two: 32K ran and 64K did not, between which the prediction lies",
    "ulysses": SEARCHED, "ulysses+tiled_mlp": SEARCHED, "ulysses+offload": SEARCHED, "alst": SEARCHED,
    "1 GPU, ALST": SEARCHED, "8 GPUs, ALST": SEARCHED, "32 GPUs, ALST": SEARCHED,
}  # fmt: skip


def _length(name: str, stated: int, gpus: int, seconds: float | None, **changes: Any) -> dict[str, Any]:
    row, preset = changes.pop("row", "baseline"), changes.pop("preset", "paper")
    machine = Machine(gpus=gpus, host_memory=HOST, rates=rates_of(changes.pop("gpu", "H100")))
    run = row_config(row, BASE.replace(model={"name": changes.pop("model", EIGHT_B)}, engine={"sp": 0})).replace(
        **changes
    )
    run = run.replace(engine={"sp": run.engine.sp or gpus})
    shape = read_shape(run.model.name)
    best = longest(shape, run, machine, preset=preset)
    at = predict(shape, run, machine, stated, preset)
    predicted = best.seq_len if best else 0
    return {
        "row": name, "gpus": gpus, "stated": stated, "predicted": predicted, "error": predicted / stated - 1,
        "limit": predict(shape, run, machine, int(1.02 * max(predicted, 100)), preset).limit,
        "peak_at_stated_gib": at.device_peak / GIB, "stated_seconds": seconds,
        "predicted_seconds": at.seconds["step"], "why": WHY.get(name, MEGATRON if "ZeRO" in name else ""),
    }  # fmt: skip


def table_1() -> list[dict[str, Any]]:
    """ALST, Table 1: Llama-3.1-8B on 8 H100, row by row."""
    return [_length(name, paper["seq_len"], 8, paper["step_seconds"], row=name) for name, paper in PAPER_ROWS.items()]


def tables_2_to_4() -> list[dict[str, Any]]:
    """ALST, Tables 2 to 4: the longest with everything on, on 1, 8 and 32 H100."""
    return [
        _length("1 GPU, ALST", 500_000, 1, 1010, row="alst", engine={"offload_params": True}),
        _length("8 GPUs, ALST", 3_700_000, 8, 6455, row="alst"),
        _length("32 GPUs, ALST", 15_000_000, 32, 26_709, row="alst"),
    ]


def hugging_face() -> list[dict[str, Any]]:
    """Ulysses in Hugging Face: device peaks of Qwen3-4B on 4 H100, without a tiled loss (GB are decimal).

    The slope agrees (507 KB a token predicted, 479 stated), and 11 to 14 GB are missing. The same source has
    22.4 GB for 8K tokens without sequence parallelism, of which the logits are 15, and 22.8 GB with it, where they are
    4: so its stack takes those GB with sequence parallelism only, and they are no tensors of the model.
    """
    shape = read_shape("Qwen/Qwen3-4B")
    run, machine = BASE.replace(model={"name": shape.name}, engine={"sp": 4}), Machine(gpus=4)
    rows = []
    for tokens, stated in ((8192, 22.8), (32_768, 35.0), (65_536, 50.5), (98_304, 66.0), (131_072, None)):
        found = predict(shape, run, machine, tokens, "paper")
        tensors = (found.device_peak - sum(machine.overhead().values())) / 1e9
        rows.append({
            "row": format_tokens(tokens), "stated": stated or "out of memory", "predicted": tensors,
            "error": tensors / stated - 1 if stated else None, "fits": found.fits,
        })  # fmt: skip
    return rows


def fpdt() -> list[dict[str, Any]]:
    """FPDT, Table 3: Ulysses with ZeRO on 8 A100-80GB, without tiles: everything kept, and checkpoints on the host."""

    def with_zero(name: str, stage: int, tokens: int, **how: Any) -> dict[str, Any]:
        engine = {"zero_stage": stage, "offload_optimizer": False, "sp": 8}
        return _length(f"Ulysses, ZeRO-{stage}{name}", tokens, 8, None, gpu="A100", engine=engine, **how)

    return [
        *(with_zero("", n, 64_000, options={"checkpoint": False}, preset="ours") for n in (1, 2, 3)),
        *(with_zero(", checkpoints on the host", n, 512_000, options={"offload": "sync"}) for n in (1, 2, 3)),
    ]  # fmt: skip


FPDT_TABLE_1 = {
    "meta-llama/Llama-3.1-8B": {4: 2_000_000, 8: 4_000_000, 16: 8_000_000, 32: 8_000_000},
    "Qwen/Qwen2.5-32B": {8: 1_000_000, 16: 3_000_000, 32: 4_000_000},
    "meta-llama/Llama-3.1-70B": {16: 1_000_000, 32: 4_000_000},
}
"""Lengths that FPDT's authors state for A100-80GB, by GPUs (8M were not tried beyond). Their 30B is of another shape
than the nearest that is here."""


def streaming() -> list[dict[str, Any]]:
    """Lengths of papers that keep keys and values on the host, and what our ways reach on their machines.

    FPDT, Table 1, where 1 TB of host memory on each node of 4 is assumed, and the longest of every way of ours; SeCOv2,
    Table 1: Qwen2.5-7B on one GPU of 96 GB, where a choice of 16 pages is planned too.
    """
    paged = {"options.chunk": CHUNK, "contrib.sparse": {"top": 16}}
    rows = [
        ours("FPDT", name, stated, machine(n, "A100", per_node=min(n, 4), host_memory=1_000_000_000_000))
        for name, by in FPDT_TABLE_1.items() for n, stated in by.items()
    ]  # fmt: skip
    return [*rows, ours("SeCOv2", SEVEN_B, 4_000_000, machine(1, gpu_memory=label_bytes("96GB")), **paged)]


def machine(gpus: int, gpu: str = "H100", **fields: Any) -> Machine:
    """So many GPUs with the host of the ALST paper, or with other fields."""
    rates = rates_of(gpu)
    usual = {"per_node": min(gpus, 8), "gpu_memory": int(rates.usable), "host_memory": HOST}
    return Machine(gpus=gpus, rates=rates, **{**usual, **fields})


def ours(whose: str, name: str, stated: int, on: Machine, **changes: Any) -> dict[str, Any]:
    """What every way of ours reaches on the machine of a stated length, and the step of this length."""
    base = RunConfig(model=Model(name=name, dtype="bf16"), engine=Engine(sp=0))
    run = row_config("ours", base).replace(**{"options.chunk": None, **changes})
    found = Question(read_shape(name, run.model.config), run, on).ways(stated)
    best = max(
        (w for w in found if w.best and w.what != SPARSE), key=lambda w: w.best.seq_len if w.best else 0, default=None
    )
    exact = [w.at.seconds["step"] for w in found if w.at and w.what != SPARSE]
    rate = model_flops(read_shape(name, run.model.config), run, stated) / on.gpus / on.rates.peak
    return {
        "row": f"{whose}, {name.split('/')[1]} on {on.gpus} {on.rates.name}", "stated": stated,
        "predicted": best.best.seq_len if best and best.best else 0, "way": best.what if best else "",
        "by_way": {w.what: w.best.seq_len if w.best else 0 for w in found}, "limit": best.limit if best else "",
        "seconds_at_stated": {w.what: w.at.seconds["step"] for w in found if w.at},
        "fastest": min(exact, default=None), "mfu": rate / min(exact) if exact else None,
    }  # fmt: skip


TRL: dict[str, Any] = {"row": "ulysses+offload", "model": "Qwen/Qwen3-8B", "engine": {"offload_optimizer": False}}
NEAR_TRL = (
    "near: ALST's stack with the optimizer on the devices. Alike are a tiled loss, whole MLPs and checkpoints on the "
    "host; TRL's has FSDP2, torch's ring and SDPA in place of ZeRO-3, the all-to-all and flash-attn 2"
)
NEAR_HF = "128K did not run; 11 to 14 GB are taken with sequence parallelism only, and are no tensors of the model"
THIRTEEN_B = {"vocab_size": 32_000, "hidden_size": 5120, "intermediate_size": 13_824, "num_hidden_layers": 40,
              "num_attention_heads": 40, "num_key_value_heads": 40}  # fmt: skip
"""LLaMA 13B: the abstract of SuperOffload says no more of its model than 13B."""


def published(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """All stated lengths in one table: the `limit` of a stack, or a `point` that ran; ours on its machine; and the plan
    of its `own` stack where we have that or one near it. The host of the ALST paper where none is stated."""
    four_b, gh200 = "Qwen/Qwen3-4B", {"per_node": 1, "host_memory": rates_of("GH200").node_host}
    alst = [*tables["ALST, Table 1"], *tables["ALST, Tables 2 to 4"][::2]]
    upipe = ours("UPipe", EIGHT_B, 5_000_000, machine(8))
    superoffload = ours("", EIGHT_B, 1_000_000, machine(8, "GH200", **gh200), **{"model.config": THIRTEEN_B})
    kept = tables["Keys and values on the host"]
    return [
        *({**ours(f"ALST, {r['row'].removesuffix(', ALST')}", EIGHT_B, r["stated"], machine(r["gpus"])), "own": r}
          for r in alst),
        {**ours("Ulysses in Hugging Face", four_b, 98_304, machine(4)), "why": NEAR_HF,
         "own": _length("", 98_304, 4, None, model=four_b, engine={"sp": 4})},
        *({**ours("TRL 1.13", TRL["model"], n * 2**17, machine(n)), "kind": "point", "why": NEAR_TRL,
           "own": _length("", n * 2**17, n, seconds, **TRL), "stated_peak_gib": peak and peak * 1e9 / GIB}
          for n, seconds, peak in ((8, 380, 56.2), (16, 696, None), (32, 1346, None))),
        upipe,
        {**superoffload, "row": "SuperOffload, 13B on 8 GH200", "why": "an MFU of 55% is stated, and no time"},
        *({**ours(f"FPDT, {r['row']}", EIGHT_B, r["stated"], machine(8, "A100")), "own": r}
          for r in tables["FPDT, Table 3"]),
        *({**r, "kind": "point" if r["stated"] == 8_000_000 or r == kept[-1] else "limit"} for r in kept),
        {**ours("OOMB", SEVEN_B, 4_000_000, machine(1, "H200")), "kind": "point"},
    ]  # fmt: skip


def published_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Stated lengths and the planned ones; below, by number, why a limit is more than 15% off the plan of its own
    stack."""
    lines = [
        "| stated by | stated | stated: its step | predicted, own stack | predicted, own stack: its step | "
        "predicted, ours: layers whole | predicted, ours: the longest way | predicted, ours: its step, MFU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    remarks: list[str] = []
    for r in rows:
        own, limit = r.get("own") or {}, r.get("kind") != "point"
        why = "" if own and limit and abs(own["error"]) <= 0.15 else r.get("why") or own.get("why", "")
        remarks += [why] * (why not in ("", *remarks))
        stated = f"{'up to' if limit else 'ran'} {r['stated']:,}"
        planned = f"{own['predicted']:,}" + f" ({own['error']:+.0%})" * limit if own else ""
        if peak := r.get("stated_peak_gib"):
            stated, planned = (
                f"{stated} in {peak:.1f} GiB",
                f"{planned}; {own['peak_at_stated_gib']:.1f} GiB at that length",
            )
        times = own.get("stated_seconds"), own.get("predicted_seconds"), r["fastest"]
        took, takes, would = ("" if n is None else format_seconds(n) for n in times)
        remark = f" (remark {remarks.index(why) + 1})" if why else ""
        lines.append(
            f"| {r['row']}{remark} | {stated} | {took} | {planned} | {takes} | {r['by_way']['layers whole']:,} | "
            f"{r['predicted']:,} | {would}, {r['mfu'] or 0:.0%} |"
        )
    return "\n".join([*lines, "", *(f"{n}. {why}" for n, why in enumerate(remarks, 1))])


def everything() -> dict[str, list[dict[str, Any]]]:
    """All tables."""
    tables = {
        "ALST, Table 1": table_1(), "ALST, Tables 2 to 4": tables_2_to_4(), "Hugging Face, Qwen3-4B": hugging_face(),
        "FPDT, Table 3": fpdt(), "Keys and values on the host": streaming(),
    }  # fmt: skip
    return {**tables, "Published lengths": published(tables)}


def main() -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    tables = everything()
    FILE.write_text(json.dumps({"mode": "predicted", "tables": tables}, indent=1) + "\n")
    before, mark, rest = PAGE.read_text().partition("<!-- published -->\n")
    table = published_markdown(tables["Published lengths"])
    PAGE.write_text(f"{before}{mark}{table}\n<!-- /published -->{rest.partition('<!-- /published -->')[2]}")
    for name, rows in tables.items():
        print(name)
        for r in rows:
            print("  ", {k: v for k, v in r.items() if k != "why"})


if __name__ == "__main__":
    main()
