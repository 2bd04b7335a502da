"""One node's part of a run over several nodes: srun starts this once on each of them (alst.sbatch).

Usage: node.py PARAMETERS.yaml OUT ENDPOINT. PARAMETERS.yaml holds parameters of notebooks/run.ipynb, such as `row`,
`seq_len` and `config`; OUT is on a file system that all nodes share; ENDPOINT is host:port on the first node.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import yaml

from alstlib.config import RunConfig, row_config
from alstlib.runs import launch, results


def configuration(given: dict[str, Any]) -> RunConfig:
    """What notebooks/run.ipynb makes of the same parameters."""
    row, config = given.pop("row", ""), given.pop("config", {})
    base = RunConfig.from_dict({**given, **config})
    return (row_config(row, base) if row else base).replace(**config)


def main(parameters: str, out: str, endpoint: str) -> None:
    nodes, rank = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NODEID"])
    given = yaml.safe_load(Path(parameters).read_text(encoding="utf-8")) or {}
    worker = given.pop("worker", "alstlib.train.ablation")
    config = launch.resolve(configuration(given), nodes)
    folder = Path(out).resolve()
    if rank == 0:  # for papermill, in the batch step: it finds the run finished and shows it
        folder.mkdir(parents=True, exist_ok=True)
        results.write_json(folder / "parameters.yaml", {"config": config.to_dict(), "out": str(folder)})
    launch.launch(
        config,
        folder,
        on_progress=launch.progress_printer() if rank == 0 else None,
        nodes=launch.Nodes(nodes, rank, endpoint if nodes > 1 else None),
        worker=worker,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
