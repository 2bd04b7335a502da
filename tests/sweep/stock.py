"""Which types of the sweep the stock route to sequence parallelism refuses: Accelerate's own check, which transformers'
Trainer calls when it prepares a model (`ParallelismConfig(sp_size=...)`), on each type's small config.

`python -m tests.sweep.stock` writes them to papermill_runs/results/support/stock.jsonl, with the reason.
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import accelerate  # noqa: E402
import small  # noqa: E402
import table  # noqa: E402
from accelerate.big_modeling import _refuse_recurrent_layers_under_sequence_parallelism as check  # noqa: E402

PATH = table.RESULTS / "stock.jsonl"


def refused(kind):
    """The reason, or nothing."""
    try:
        config = small.small_config(kind)
    except Exception:  # the sweep says that it is not built
        return ""
    try:
        check(type(kind, (), {"config": config})())
    except ValueError as e:
        return str(e)
    return ""


if __name__ == "__main__":
    lines = [{"type": kind, "reason": why} for kind in small.TYPES if (why := refused(kind))]
    PATH.write_text("".join(json.dumps({"accelerate": accelerate.__version__, **line}) + "\n" for line in lines))
