"""The sweep: every causal language model that transformers can build, on 1, 2 and 3 ranks, judged against plain
transformers. `make sweep` runs it whole, with the oldest and the newest transformers, and writes the table.

    python -m tests.sweep.drive [--images] [--only TYPE...] [--sp N...] [--keep]

With `--images` the types are those of AutoModelForImageTextToText, on text alone and on samples with images. What is
judged is appended to papermill_runs/out/sweep, a line of JSON for each case. A sweep that was stopped, or in which
something was wrong, goes on with the cases that are not as they should be. With `--keep` the outcome of each type that
was judged is also written to papermill_runs/results/support, from where `table.py` takes it; with `--only`, what is
kept of the other types stays as it is.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "sweep")]

import judge  # noqa: E402
import judge_images  # noqa: E402
import small  # noqa: E402
import small_vlm  # noqa: E402
import table  # noqa: E402
import transformers  # noqa: E402
from conftest import RankPool  # noqa: E402

from alstlib.planner.measure import verify  # noqa: E402

OUT = TESTS.parent / "papermill_runs" / "out" / "sweep"
JUDGES = {"sweep": (judge, small.TYPES), "images": (judge_images, small_vlm.TYPES)}
"""Of each sweep, what judges a type, and the types."""
GOOD = ("exact", "refused", "not built")


def read(path):
    """The last outcome of each case."""
    return {(line["type"], line["sp"], line["case"]): line for line in table.stored(path)}


def on_rank(rank, world, of, kind):
    judge, _ = JUDGES[of]
    with verify.quiet():
        return judge.judge(rank, world, kind, judge.CASES)


def judged(pools, sp, kind, of="sweep"):
    """The outcome of every case of this type at this degree: the worst of its ranks."""
    if sp == 1:
        return on_rank(0, 1, of, kind)
    try:
        ranks = pools.setdefault(sp, RankPool(sp))(on_rank, of, kind, timeout=240)
    except AssertionError as e:  # a rank died, or waits for another: its pool is started anew for the next type
        return [{"result": "crash", "reason": verify.why(e)} for _ in JUDGES[of][0].CASES]
    return [max(each, key=lambda one: (one["result"] not in GOOD, one.get("gradient", 0.0))) for each in zip(*ranks)]


def sweep(types, degrees, path, of="sweep"):
    """Judge what `path` has not, or not as it should be, and append it there."""
    cases = JUDGES[of][0].CASES
    path.parent.mkdir(parents=True, exist_ok=True)
    found, pools, began = read(path), {}, time.monotonic()
    good = {key for key, line in found.items() if line["result"] in GOOD}
    todo = [(sp, kind) for sp in degrees for kind in types if not good.issuperset((kind, sp, case) for case in cases)]
    with path.open("a") as out:
        for i, (sp, kind) in enumerate(todo, 1):
            outcomes = dict(zip(cases, judged(pools, sp, kind, of)))
            for case, outcome in outcomes.items():
                found[kind, sp, case] = {"type": kind, "sp": sp, "case": case, **outcome}
                print(json.dumps(found[kind, sp, case]), file=out, flush=True)
            kinds = ", ".join(sorted({o["result"] for o in outcomes.values()}))
            bad = "".join(f"\n    {c}: {o['reason']}" for c, o in outcomes.items() if o["result"] not in GOOD)
            print(f"[{i}/{len(todo)}, {time.monotonic() - began:.0f} s] sp {sp} {kind}: {kinds}{bad}", flush=True)
    for pool in pools.values():
        pool.stop()
    return {key: line for key, line in found.items() if key[0] in types and key[1] in degrees}


def keep(found, path):
    """Write the outcome of each type that was judged; of the others, what is there stays."""
    kept = {one["type"]: one for one in table.stored(path)}
    for kind in {key[0] for key in found}:
        kept[kind] = table.summary([line for key, line in found.items() if key[0] == kind])
    path.write_text("".join(json.dumps(kept[kind]) + "\n" for kind in sorted(kept)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", action="store_true", help="the types of AutoModelForImageTextToText")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types")
    parser.add_argument("--sp", nargs="+", type=int, default=[1, 2, 3], help="sequence-parallel degrees")
    parser.add_argument("--keep", action="store_true", help="write the outcome of these types to the results")
    args = parser.parse_args()
    of = "images" if args.images else "sweep"
    name, types = f"{of}-{transformers.__version__}.jsonl", JUDGES[of][1]
    if unknown := set(args.only or ()) - set(types):
        parser.error(f"the {of} of transformers {transformers.__version__} has no type {', '.join(unknown)}")
    with verify.quiet():
        found = sweep(args.only or types, args.sp, OUT / name, of)
    counts = Counter(line["result"] for line in found.values())
    listed = ", ".join(f"{counts[result]} {result}" for result in (*GOOD, "wrong", "crash"))
    print(f"transformers {transformers.__version__}: {listed}")
    if args.keep:
        keep(found, table.RESULTS / name)
    return int(counts["wrong"] + counts["crash"] > 0)


if __name__ == "__main__":
    sys.exit(main())
