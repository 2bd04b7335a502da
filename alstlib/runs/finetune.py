"""`alst finetune` trains a model on files of one's own with `train.finetune`, from any folder. Without torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from alstlib.base.config import RunConfig, check_path, merged
from alstlib.hf.loading.configs import check_model
from alstlib.planner import devices
from alstlib.planner.command import fields_of
from alstlib.planner.question import trained_length
from alstlib.runs import launch, results, workers

HELP = "fine-tune a model on files of your own, from any folder, and save it for plain transformers"
EXIT = (
    "Exit status: 0 when the model is saved; 1 when the training failed; 2 when the command was refused. With --set "
    "output.checkpoint_every=100 the same command continues after a kill."
)
OPTIONS = {
    "--model": ("NAME", None, "a folder with a model, or a name on the Hugging Face hub"),
    "--data": ("PATH", None, "a file or folder of text, JSON lines (with images) or Parquet, or a name on the hub"),
    "--out": ("FOLDER", "tuned", "the model is saved to FOLDER/model, an adapter also to FOLDER/adapter"),
    "--lora": ("FIELDS", "", "train an adapter: fields of peft's LoraConfig, such as r=16,lora_alpha=32"),
    "--sp": ("RANKS", "0", "the ranks that share each sample; 0: all of them"),
    "--seq-len": (
        "TOKENS", "", "the longest sample, such as 128K; longer documents are cut into several. Without it: what the "
        "model was trained for, at most 32,768 (without a GPU 1,024)",
    ),
    "--epochs": ("NUMBER", "1", "how often the data are read"),
}  # fmt: skip
"""The options: what they take, their defaults (None: there is none), and what they say."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `alst finetune`."""
    for name, (takes, default, text) in OPTIONS.items():
        text += f" (default: {default})" if default else ""
        parser.add_argument(name, metavar=takes, default=default, required=default is None, help=text)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="a field of alstlib.RunConfig, such as optim.learning_rate=1e-5, data.eval=0.05, optim.steps=100, or "
        "optim.trainer={report_to: tensorboard}; may be given several times",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="train what is finished, or is predicted not to fit")


def run_of(args: argparse.Namespace) -> RunConfig:
    """The run that the options describe, resolved for this machine."""
    model, data = Path(args.model).expanduser(), Path(args.data).expanduser()
    check_path("data", args.data, local=bool(data.suffix))
    changes = fields_of(args.set, "--set")
    trainer = {"lr_scheduler_type": "cosine", "packing_strategy": "bfd_split", "eval_steps": 0.1}
    if "optim.steps" not in changes:
        trainer["num_train_epochs"] = float(args.epochs)
    trainer |= changes.pop("optim.trainer", {})
    lora = fields_of(args.lora.split(","), "--lora") if args.lora else None
    fields = {
        "row": "finetune",
        "model": {"name": str(model.resolve()) if model.is_dir() else args.model, "lora": lora},
        "data": {"name": str(data.resolve()) if data.exists() else args.data, "packed": True},
        "options": {"offload": True},
        "engine": {"sp": args.sp, "offload_optimizer": lora is None},
        "optim": {"learning_rate": 1e-4 if lora else 1e-5, "max_grad_norm": 1.0, "trainer": trainer},
        "limits": {"timeout": 0},  # nobody knows yet how many steps an epoch has
        "output": {"save_to": str(Path(args.out).resolve() / "model"), "merge_lora": lora is not None},
    }
    run = RunConfig.from_dict(merged(fields, {"data.seq_len": args.seq_len or 1})).replace(**changes)
    check_model(run.model.name)
    if not args.seq_len and "data.seq_len" not in changes:
        usual = 32_768 if devices.device_count() else 1024
        run = run.replace(data={"seq_len": min(usual, trained_length(run) or usual)})
    return launch.resolve(run)


def finetune(args: argparse.Namespace) -> int:
    """The command; its exit status is EXIT's."""
    run, out = run_of(args), Path(args.out).resolve()
    ranks = f"{run.engine.world_size} ranks, {run.engine.sp} of which share a sample"
    print(f"samples of up to {run.data.seq_len:,} tokens on {ranks}; logs and result.json are in {out}", flush=True)
    show = launch.progress_printer()
    try:
        result = launch.launch(run, out, worker=workers.FINETUNE, force=args.force, on_progress=show)
    except launch.RunFailed as e:
        result = e.result
    if result["status"] != "ok":
        print(f"alst: {results.why(result)} (the ranks' logs are in {out / 'logs'})", file=sys.stderr)
        return 1
    print(*(f"note: {note}" for note in result["metrics"]["notes"]), sep="\n")
    print(f'saved; load it with: {result["metrics"]["loaded_by"]}.from_pretrained("{run.output.save_to}")')
    return 0
