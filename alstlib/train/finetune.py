"""The worker of a fine-tuning, started by torchrun: `python -m alstlib.train.finetune --config FILE --out DIR`.

TRL's SFTTrainer trains, with `alstlib.TrainerMixin` before it. Schedules, evaluation, trackers, LoRA, checkpoints,
resume, the model card and the hub are the libraries', and what is here maps a run's fields to theirs (`settings`). On a
GPU the engine is DeepSpeed or FSDP2. On a CPU it is DDP, because Accelerate knows no other there.

Rows become token ids and labels by `alstlib.data`, which reads more formats than TRL and labels what the assistant says
for any chat template. TRL cuts, packs and pads them: what is longer than `seq_len` is cut off, unless `trainer` says
`{packing_strategy: bfd_split}`.

Checkpoints go to `checkpoints` in the run's folder, every `checkpoint_every` steps. The same command continues from the
last whole one. Those of another configuration are never continued and never replaced: they are moved aside.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

import alstlib
from alstlib.config import RunConfig, bound, flat
from alstlib.data.account import Account
from alstlib.data.corpus import get_tokenizer, load_corpus, places
from alstlib.data.samples import tokenize_row
from alstlib.hf.loading import load_on_first, place
from alstlib.hf.models import load_model, model_config, put_liger
from alstlib.hf.zero_config import engine_config
from alstlib.mesh import gather_text
from alstlib.offload.ledger import Ledger
from alstlib.planner.preflight import SLOW_DISK
from alstlib.runs import locks, results
from alstlib.runs.progress import Pace
from alstlib.runs.workers import FINETUNE
from alstlib.train.engine import host_tensors, reserve_adam_state
from alstlib.train.files import place_aside
from alstlib.train.resume import ended, ending
from alstlib.train.worker import Job, run_worker, wait_for

MOST_LOST = 0.01
"""The share of rows that may be left out without `allow_dropped`."""
WATCHED = 2
"""Steps whose memory is watched on a CPU; their times are not taken."""
ON_CPU = "the engine is DDP: Accelerate knows neither DeepSpeed nor FSDP2 on a CPU"


def engine_of(run: RunConfig, gpu: bool) -> str:
    """`ddp`, `fsdp2`, or `zero0` to `zero3`."""
    return "ddp" if not gpu else "fsdp2" if run.engine.fsdp else f"zero{run.engine.zero_stage}"


def settings(run: RunConfig, engine: str, bf16: bool, folder: Path, deepspeed: dict[str, Any]) -> dict[str, Any]:
    """Fields of SFTConfig: those that follow from the run's, and those in `trainer`, which win. Of DeepSpeed's
    configuration the Trainer decides the optimizer, batches and clipping."""
    every, optim = run.output.checkpoint_every, run.optim
    made: dict[str, Any] = {
        "output_dir": str(folder), "max_length": run.data.seq_len, "packing": run.data.packed, "bf16": bf16,
        "per_device_train_batch_size": run.data.batch_size, "per_device_eval_batch_size": run.data.batch_size,
        "gradient_accumulation_steps": optim.accumulation, "learning_rate": optim.learning_rate, "seed": optim.seed,
        "max_steps": -1 if "num_train_epochs" in optim.trainer else optim.steps, "warmup_steps": optim.warmup_steps,
        "weight_decay": optim.weight_decay, "max_grad_norm": optim.max_grad_norm, "gradient_checkpointing": False,
        "logging_steps": 1, "logging_nan_inf_filter": False, "disable_tqdm": True, "report_to": "none",
        "eval_strategy": "no" if run.data.eval is None else "steps", "eval_steps": -(-optim.steps // 10),
        "save_strategy": "steps" if every else "no", "save_steps": every or 500, "save_total_limit": 2,
        "use_cpu": engine == "ddp",
    }  # fmt: skip
    if engine == "fsdp2":
        made |= {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}}
    elif engine != "ddp":
        auto = (
            "train_micro_batch_size_per_gpu",
            "train_batch_size",
            "gradient_accumulation_steps",
            "gradient_clipping",
        )
        zero = {**deepspeed["zero_optimization"], "stage3_gather_16bit_weights_on_model_save": True}
        config = {**deepspeed, "zero_optimization": zero, **dict.fromkeys(auto, "auto")}
        made["deepspeed"] = {name: value for name, value in config.items() if name != "optimizer"}
    return {**made, **run.optim.trainer}


class FineTune(Job):
    """One rank of a fine-tuning."""

    def __init__(self, run: RunConfig, out: Path) -> None:
        super().__init__(run, out)
        self.engine = engine_of(run, self.gpu)
        if self.engine == "ddp" and self.bf16:
            raise ValueError("dtype='bf16' needs a GPU: on a CPU fine-tuning is in fp32 (dtype='auto')")
        self.check_writable()
        self.notes = [] if self.gpu else [ON_CPU]
        config = model_config(run.model.name, run.model.config, run.model.trust_remote_code)
        self.vocabulary = config.get_text_config().vocab_size
        self.say(f"reading data '{run.data.name}' and the tokenizer")
        data, others, self.tokenizer = self._documents()
        self.checkpoint = self._last_checkpoint()
        self.trainer = self._trainer(data, others)
        self.watch = Watch(self)
        self.trainer.add_callback(self.watch)

    def _documents(self) -> tuple[Any, Any, Any]:
        """Documents to train on and to evaluate on as token ids and labels, and the tokenizer."""
        run = self.run
        corpus, others = load_corpus(run.data.name), None
        tokenizer = self.tokenizer_for(corpus, self.vocabulary)
        made = self._tokens(corpus, tokenizer, run.data.name)
        if isinstance(run.data.eval, str):
            others = self._tokens(load_corpus(run.data.eval), tokenizer, run.data.eval)
        elif run.data.eval is not None:
            if len(made) < 2:
                raise ValueError(
                    f"eval_data={run.data.eval} keeps back a share of data='{run.data.name}', one document"
                )
            parts = made.train_test_split(test_size=run.data.eval, seed=run.optim.seed)
            made, others = parts["train"], parts["test"]
        # of data that are tokens only the padding token is needed
        stand_in = tokenizer or get_tokenizer("stdlib-bpe", vocab_size=min(self.vocabulary, 8192))
        return made, others, stand_in

    def _tokens(self, corpus: Any, tokenizer: Any, name: str) -> Any:
        limit, rows = self.run.data.seq_len, len(corpus)
        self.say(f"tokenizing {rows:,} documents of '{name}'")

        pace, done = Pace(self.say, f"tokenizing '{name}'", rows), itertools.count(1)
        split = self.run.optim.trainer.get("packing_strategy") in ("bfd_split", "wrapped")
        read = functools.partial(tokenize_row, tokenizer=tokenizer)
        account = Account(read, f" of '{name}'", None if split else limit, functools.partial(places, name, rows))

        def tokens(row: dict[str, Any], number: int) -> dict[str, Any]:
            pace(next(done))
            document = account(row, number)
            self.check_tokens(int(document.ids.max(initial=0)), self.vocabulary)
            size = len(document.ids) if account.trains(document) else 0
            return {"input_ids": document.ids, "labels": document.labels, "size": size}

        made = corpus.map(tokens, with_indices=True, remove_columns=corpus.column_names, load_from_cache_file=False)
        sizes = made["size"][:]
        made = made.select([i for i, size in enumerate(sizes) if size]).remove_columns("size")
        if not len(made):
            raise ValueError(
                f"none of {rows} rows of '{name}' has a token with a loss: chats need a message of the assistant, "
                "prompts a completion, and labels a value besides -100"
            )
        lost = account.notes(" and are left out")
        if account.lost > MOST_LOST * rows and not self.run.data.allow_dropped:
            raise ValueError(
                f"{account.lost} of {rows} rows of '{name}' ({account.lost / rows:.1%}) would be left out, more than "
                f"{MOST_LOST:.0%}: mend them, or leave them out with allow_dropped: true (alst run --allow-dropped). "
                + "; ".join(lost)
            )
        for note in lost:
            self.say(note)
        self.notes += lost
        if long := sum(size > limit for size in sizes):
            how = "with packed=True, trainer={'packing_strategy': 'bfd_split'} cuts nothing off"
            self.notes += [] if split else [f"{long} of {rows} rows of '{name}' were cut at {limit:,} tokens; {how}"]
        return made

    def _trainer(self, data: Any, others: Any) -> Any:
        from peft import LoraConfig
        from trl import SFTConfig, SFTTrainer

        class SPTrainer(alstlib.TrainerMixin, SFTTrainer):
            pass

        run = self.run
        self.say(f"loading {run.model.name}")
        arrival = load_on_first(run, self.dtype, self.device)
        put_liger(run, arrival.model, self.gpu)
        deepspeed = engine_config(run, sum(p.numel() for p in arrival.model.parameters()), self.bf16)
        place(arrival, deepspeed if self.engine.startswith("zero") else {"zero_optimization": {"stage": 0}})
        args = SFTConfig(**settings(run, self.engine, self.bf16, self.out / "checkpoints", deepspeed))
        lora = {"task_type": "CAUSAL_LM", "target_modules": "all-linear", **(run.model.lora or {})}
        cls: Any = SPTrainer
        return cls(
            model=arrival.model, args=args, train_dataset=data, eval_dataset=others, processing_class=self.tokenizer,
            peft_config=None if run.model.lora is None else LoraConfig(**lora), sp=run.engine.sp, alst=run.options,
        )  # fmt: skip

    # ----- checkpoints

    def _last_checkpoint(self) -> str | None:
        """The last whole checkpoint of this configuration, on every rank. Others are moved aside."""
        found: dict[str, Any] = {"checkpoint": None, "notes": []}
        if self.rank == 0:
            found = self._look()
        found = json.loads(gather_text(json.dumps(found), self.device)[0])
        self.notes += found["notes"]
        return found["checkpoint"]

    def _look(self) -> dict[str, Any]:
        run, folder, notes = self.run, self.out / "checkpoints", []
        now = self._bound(run.to_dict())
        before = locks.read_object(folder / "run.json") or {}
        if folder.exists() and (before != now or run.output.resume == "never" or self._finished(now)):
            folder.rename(aside := place_aside(folder))
            names = [n for n in now if before.get(n, now[n]) != now[n]]
            why = ", ".join(f"{n}={before[n]!r} (here {now[n]!r})" for n in names)
            notes.append(f"checkpoints of {why or 'an earlier run'} are kept in {aside.name} and not continued")
        folder.mkdir(parents=True, exist_ok=True)
        results.write_json(folder / "run.json", now)
        # what is cut off lacks the file that is written last
        whole = [p for p in folder.glob("checkpoint-*") if (p / "trainer_state.json").exists()]
        last = max(whole, key=lambda p: int(p.name.rpartition("-")[2]), default=None)
        notes += [f"continued from {last.name}"] if last else []
        return {"checkpoint": str(last) if last else None, "notes": notes}

    @staticmethod
    def _bound(fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that a checkpoint belongs to: beyond those of a training state the schedule, which ends with the
        last step, and the engine, because each has its own files."""
        more = ("optim.steps", "engine.zero_stage", "engine.fsdp")
        found = {**bound(fields), **{name: flat(fields).get(name) for name in more}}
        return json.loads(json.dumps(found, default=str))

    def _finished(self, now: dict[str, Any]) -> bool:
        """Whether this very run ended well here before: it is repeated from its first step."""
        try:
            result = results.read_result(self.out / "result.json")
        except (OSError, ValueError):
            return False
        return result["status"] == "ok" and self._bound(result["config"]) == now

    # ----- training

    def __call__(self) -> dict[str, Any]:
        trainer, watch = self.trainer, self.watch
        self.say("starting the Trainer" + (f" from {self.checkpoint}" if self.checkpoint else ""))
        try:
            trainer.train(resume_from_checkpoint=self.checkpoint)
        finally:
            watch.close()
        state = trainer.state
        if watch.ending is not None:
            raise ended(watch.ending, self.run, state.global_step, self.out / "checkpoints")
        if self.run.data.eval is not None and all(
            line["step"] != state.global_step for line in state.log_history if "eval_loss" in line
        ):
            trainer.evaluate()
        return self._metrics(state.log_history)

    def _metrics(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        run, trainer, watch = self.run, self.trainer, self.watch
        steps, evaluations = ([line for line in history if name in line] for name in ("loss", "eval_loss"))
        timed = slice(WATCHED if len(watch.seconds) > WATCHED else 0, None)
        seconds, tokens = watch.seconds[timed], watch.tokens[timed]
        peaks = self.gather(*watch.peaks)
        parameters = {n: getattr(p, "ds_numel", p.numel()) for n, p in trainer.model.named_parameters()}
        trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
        handle = trainer.handle
        return {
            "predicted": self.predicted(FINETUNE, trainer.ctx, run.data.seq_len),
            "seq_len": run.data.seq_len,
            "tokens_per_step": round(statistics.median(tokens)) if tokens else None,
            "tokens_per_second": sum(tokens) / sum(seconds) if seconds else None,
            "step_seconds": seconds,
            "loss": [line["loss"] for line in steps],
            "loss_steps": [line["step"] for line in steps],
            "learning_rate": [line["learning_rate"] for line in steps],
            "eval_loss": [line["eval_loss"] for line in evaluations],
            "eval_steps": [line["step"] for line in evaluations],
            "device_peak_bytes": [device for device, _ in peaks],
            "host_peak_bytes": [host for _, host in peaks],
            "engine": self.engine,
            "parameters": sum(parameters.values()),
            "trained_parameters": sum(parameters[n] for n in trained),
            "saved_to": run.output.save_to,
            "backend": handle.attention.backend_name,
            "notes": [*self.notes, *handle.notes],
        }

    def finish(self) -> None:
        """Save the model, or its adapter, as plain transformers and peft read them; push it where that is asked for."""
        run = self.run
        folder = self.out / "adapter" if run.output.merge_lora else Path(str(run.output.save_to))
        self.say(f"saving the model to {folder}")
        self.trainer.save_model(str(folder))
        dist.barrier()
        if run.output.merge_lora and self.rank == 0:
            self._merge(folder)

    def _merge(self, adapter: Path) -> None:
        """Save the model with the adapter in its weights. It is read anew, because an engine may have cut it up."""
        from peft import PeftModel
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        self.say(f"merging the adapter, to {self.run.output.save_to}")
        merged: Any = PeftModel.from_pretrained(load_model(self.run, self.dtype), str(adapter))
        merged.merge_and_unload().save_pretrained(self.run.output.save_to)
        self.tokenizer.save_pretrained(self.run.output.save_to)


class Watch(TrainerCallback):
    """Tells of steps and evaluations; takes times, tokens and the peaks of memory."""

    def __init__(self, job: FineTune) -> None:
        self.job = job
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.ledger: Ledger | None = None
        self.peaks = (0, 0)
        self.ends: list[float] = []
        self.ending: type[Exception] | None = None
        """Why the training ends before its last step."""
        self.saving = 12 * sum(getattr(p, "ds_numel", p.numel()) for p in job.trainer.model.parameters()) / SLOW_DISK
        """Seconds that a checkpoint takes: guessed before the first."""
        self.evaluated = 0
        """Batches of the evaluation that runs."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        job = self.job
        self.ledger = Ledger(job.device, [job.trainer.handle.store], job.run.limits.device_memory).__enter__()
        engine = getattr(job.trainer, "deepspeed", None)
        if engine is not None and isinstance(getattr(engine.optimizer, "optimizer", None), torch.optim.AdamW):
            reserve_adam_state(engine)
            self.ledger.mark_host(host_tensors(engine, job.run))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began, self.seen = time.perf_counter(), self.job.trainer._total_train_tokens

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wait_for(self.job.device)
        self.ends.append(time.perf_counter())
        self.seconds.append(self.ends[-1] - self.began)
        self.tokens.append(self.job.trainer._total_train_tokens - self.seen)
        if len(self.seconds) == WATCHED and not self.job.gpu:
            self.close()
        if self.job.run.output.checkpoint_every and state.global_step < state.max_steps:
            needs = 1.2 * max(self.seconds[-10:]) + 2 * self.saving + 1
            if (why := ending(self.job.out, needs, self.job.device)) is not None:
                self.ending, control.should_save, control.should_training_stop = why, True, True
        if not control.should_log:
            self._tell(state)

    def on_save(self, *_: Any, **__: Any) -> None:
        self.saving = time.perf_counter() - self.ends[-1]

    def on_prediction_step(self, *_: Any, **given: Any) -> None:
        if not self.evaluated:
            self.pace = Pace(self.job.say, "evaluating", len(given["eval_dataloader"]))
        self.evaluated += 1
        self.pace(self.evaluated)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.evaluated = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            for what in ("loss", "grad_norm"):
                if not math.isfinite(value := logs.get(what, 0.0)):
                    raise FloatingPointError(f"step {state.global_step}: its {what} is {value}")
            self._tell(state, loss=logs["loss"])
        elif "eval_loss" in logs:
            self._tell(state, message=f"evaluation: loss {logs['eval_loss']:.4f}")

    def _tell(self, state: Any, **fields: Any) -> None:
        last = self.ends[-11:] if len(self.ends) > 1 else [0.0, *self.seconds]  # with evaluations and checkpoints
        usual = (last[-1] - last[0]) / max(1, len(last) - 1)
        pace = {"tokens_per_second": self.tokens[-1] / self.seconds[-1]} if self.seconds else {}
        self.job.progress.emit(
            "step", row=self.job.run.row, seq_len=self.job.run.data.seq_len, step=state.global_step,
            steps=state.max_steps,
            eta_seconds=(state.max_steps - state.global_step) * usual, **pace, **fields,
        )  # fmt: skip

    def close(self) -> None:
        """Memory is watched no longer."""
        if self.ledger is not None:
            self.peaks = (self.ledger.device_peak, self.ledger.host_peak)
            self.ledger.close()
            self.ledger = None


def main() -> None:
    run_worker(__doc__, FineTune)


if __name__ == "__main__":
    main()
