"""The worker of a fine-tuning, started by torchrun: `python -m alstlib.runs.train.finetune --config FILE --out DIR`.

TRL's SFTTrainer trains, with `alstlib.TrainerMixin` before it. Schedules, evaluation, trackers, LoRA, checkpoints,
resume, the model card and the hub are the libraries', and what is here maps a run's fields to theirs (`settings`). On a
GPU the engine is DeepSpeed or FSDP2. On a CPU it is DDP, because Accelerate knows no other there.

Rows become token ids and labels by `alstlib.runs.corpus`, which reads more formats than TRL and labels what the
assistant says for any chat template. TRL cuts, packs and pads them: what is longer than `seq_len` is cut off, unless
`trainer` says `{packing_strategy: bfd_split}`. Rows with images are read by the model's processor when their step
comes (`ImageRows`). They are read once before, for their lengths: one that is too long is left out and not cut, and
none is packed.

Checkpoints go to `checkpoints` in the run's folder, every `checkpoint_every` steps. The same command continues from the
last whole one. Those of another configuration are never continued and never replaced: they are moved aside.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Features, List, Value
from peft import LoraConfig, PeftModel
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTConfig, SFTTrainer

import alstlib
from alstlib.base.config import RunConfig
from alstlib.base.mesh import SPContext, from_all
from alstlib.base.options import check_names
from alstlib.base.units import IGNORE
from alstlib.data.agreement import Agreement
from alstlib.hf.loading.models import auto_class, beyond_training, load_model, mfu, put_liger
from alstlib.hf.loading.ranks import load_on_first, place
from alstlib.hf.loading.zero_config import check_files, engine_config, sizes_of
from alstlib.hf.vision import image_layout, why_no_images
from alstlib.planner.measure.ledger import Ledger
from alstlib.runs import locks, results
from alstlib.runs.corpus.image_rows import ImageRows, get_processor, have_images
from alstlib.runs.corpus.reading import get_tokenizer, load_corpus
from alstlib.runs.corpus.samples import SHOWN, Account, tokenize_row
from alstlib.runs.progress import Pace
from alstlib.runs.results import Json, differences
from alstlib.runs.train import operators
from alstlib.runs.train.engine import host_tensors, reserve_adam_state
from alstlib.runs.train.files import move_aside
from alstlib.runs.train.resume import EQUAL, ended, ending, fields, finished, of_first, seconds_to_save
from alstlib.runs.train.worker import Training, run_worker, wait_for
from alstlib.runs.workers import FINETUNE

MOST_LOST = 0.01
"""The share of rows that may be left out without `allow_dropped`."""
COUNTS = ["size", "labelled", "cut"]
"""Columns of tokenized rows: tokens, labels, and labels that are cut off."""
WATCHED = 2
"""Steps whose memory is watched on a CPU; their times are not taken."""
ON_CPU = "the engine is DDP: Accelerate knows neither DeepSpeed nor FSDP2 on a CPU"
NOT_PACKED = "rows with images are not packed: each is a sample of its own"
BOUND = (*EQUAL, "optim.steps", "engine.zero_stage", "engine.fsdp")
"""Fields that a checkpoint belongs to, some more than a training state: the schedule ends with the last step, each
engine has its own files, and a share that is kept back changes the data."""


def engine_of(run: RunConfig, gpu: bool) -> str:
    """`ddp`, `fsdp2`, or `zero0` to `zero3`."""
    return "ddp" if not gpu else "fsdp2" if run.engine.fsdp else f"zero{run.engine.zero_stage}"


def settings(run: RunConfig, engine: str, bf16: bool, folder: Path, deepspeed: Json) -> Json:
    """Fields of SFTConfig: those that follow from the run's, and those in `trainer`, which win. Of DeepSpeed's
    configuration the Trainer decides the optimizer, batches and clipping."""
    every, optim = run.output.checkpoint_every, run.optim
    made: Json = {
        "output_dir": str(folder), "max_length": run.data.seq_len, "packing": run.data.packed, "bf16": bf16,
        "per_device_train_batch_size": run.data.batch_size, "per_device_eval_batch_size": run.data.batch_size,
        "gradient_accumulation_steps": optim.accumulation, "learning_rate": optim.learning_rate, "seed": optim.seed,
        "max_steps": -1 if "num_train_epochs" in optim.trainer else optim.steps, "warmup_steps": optim.warmup_steps,
        "weight_decay": optim.weight_decay, "max_grad_norm": optim.max_grad_norm, "gradient_checkpointing": False,
        "logging_steps": 1, "logging_nan_inf_filter": False, "disable_tqdm": True, "report_to": "none",
        "eval_strategy": "no" if run.data.eval is None else "steps", "eval_steps": -(-optim.steps // 10),
        "save_strategy": "steps" if every else "no", "save_steps": every or 500,
        "save_total_limit": 2, "use_cpu": engine == "ddp",
    }  # fmt: skip
    if engine == "fsdp2":
        made |= {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}}
    elif engine != "ddp":
        auto = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping"
        zero = {**deepspeed["zero_optimization"], "stage3_gather_16bit_weights_on_model_save": True}
        made["deepspeed"] = {**deepspeed, "zero_optimization": zero, **dict.fromkeys(auto, "auto")}
        del made["deepspeed"]["optimizer"]
    return {**made, **run.optim.trainer}


class SPTrainer(alstlib.TrainerMixin, SFTTrainer):
    pass


class FineTune(Training, TrainerCallback):
    """One rank of a fine-tuning. As a callback of its trainer it tells of steps and evaluations, and takes times,
    tokens and the peaks of memory."""

    longest = 0
    """Tokens of the longest document, as it is trained on."""
    images: ImageRows | None = None
    """What reads the rows, where some have images."""

    def __init__(self, run: RunConfig, out: Path) -> None:
        super().__init__(run, out)
        check_names(run.optim.trainer, SFTConfig.__dataclass_fields__, "field of SFTConfig in optim.trainer")
        check_names(run.model.lora or {}, LoraConfig.__dataclass_fields__, "field of LoraConfig in model.lora")
        self.engine = engine_of(run, self.gpu)
        if self.engine == "ddp":
            self.notes.append(ON_CPU)
            if self.bf16:
                raise ValueError("dtype='bf16' needs a GPU: on a CPU fine-tuning is in fp32 (dtype='auto')")
        if have_images(self.corpus):
            field, name = "data.tokenizer", run.data.tokenizer
            if name == "auto":
                field, name = "model", run.model.name
            self.images = ImageRows(get_processor(name, run.model.trust_remote_code, field))
            self.tokenizer = self.images.processor
            self.notes += [NOT_PACKED] if run.optim.trainer.get("packing", run.data.packed) else []
        data, others = self._documents()
        # of data that are tokens only the padding token is needed
        self.tokenizer = self.tokenizer or get_tokenizer("stdlib-bpe", vocab_size=min(self.vocabulary, 8192))
        self.checkpoint, notes = of_first(None if self.rank else self._last_checkpoint())
        self.notes += notes
        self.trainer = self._trainer(data, others)
        self.trainer.add_callback(self)
        self.ledger = Ledger(self.device, budget=run.limits.device_memory)
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.flops: list[float] = []
        """The model's FLOPs of each step, of the samples of this rank's group."""
        self.ending: type[Exception] | None = None
        """Why the training ends before its last step."""
        self.saving = seconds_to_save(self.trainer.model)
        """Seconds that a checkpoint takes: guessed before the first."""
        self.evaluated = 0
        """Batches that the evaluation which runs has done."""

    def _documents(self) -> tuple[Any, Any]:
        """Documents to train on and to evaluate on as token ids and labels."""
        run, made = self.run, self._tokens(self.corpus, self.run.data.name)
        if run.data.eval is None:
            return made, None
        if isinstance(run.data.eval, str):
            return made, self._tokens(load_corpus(run.data.eval), run.data.eval)
        parts = made.train_test_split(test_size=run.data.eval, seed=run.optim.seed)
        return parts["train"], parts["test"]

    def _tokens(self, corpus: Any, name: str) -> Any:
        if self.images is not None:
            return self._read_once(corpus, name)
        limit, rows, of = self.run.data.seq_len, len(corpus), f" of '{name}'"
        self.say(f"tokenizing {rows:,} documents{of}")
        pace = Pace(self.say, f"tokenizing '{name}'", rows)
        split = self.run.optim.trainer.get("packing_strategy") in ("bfd_split", "wrapped")
        account = Account(lambda row: tokenize_row(row, self.tokenizer), of, None if split else limit)

        def tokens(row: Json, number: int) -> Json:
            pace(number + 1)
            document = account(row, number)
            self.check_tokens(int(document.ids.max(initial=0)))
            size = len(document.ids) if account.trains(document) else 0
            labels = document.labels != IGNORE
            counts = {"size": size, "labelled": int(labels.sum()), "cut": int(labels[limit:].sum())}
            return {"input_ids": document.ids, "labels": document.labels, **counts}

        # said, because data that have such columns too may have another kind of them, which TRL does not pack
        lists, numbers = List(Value("int32")), Value("int64")
        features = Features({"input_ids": lists, "labels": lists, **dict.fromkeys(COUNTS, numbers)})
        how: Json = {"with_indices": True, "remove_columns": corpus.column_names, "features": features}
        made = corpus.map(tokens, load_from_cache_file=False, **how)
        sizes, labelled, cut = (made[name][:] for name in COUNTS)
        made = made.select([i for i, size in enumerate(sizes) if size]).remove_columns(COUNTS)
        self._leave_out(account, rows)
        if not split and (long := sum(size > limit for size in sizes)):
            whole = "with packed=True, trainer={'packing_strategy': 'bfd_split'} cuts nothing off"
            share = f"and with them {sum(cut) / max(1, sum(labelled)):.1%} of the labels"
            self.notes.append(f"{long} of {rows} rows{of} were cut at {limit:,} tokens, {share}; {whole}")
        self.longest = max(self.longest, min(max(sizes), limit))
        return made

    def _leave_out(self, account: Account, rows: int, long: Sequence[str] = ()) -> None:
        """Note which rows are left out, because they train nothing or are too long, or refuse so many."""
        account.refuse_useless()
        told = [account.note(" and are left out")] if account.useless else []
        if long:
            too = f"{len(long)} of {rows} rows{account.of} are longer than seq_len={self.run.data.seq_len:,}"
            told.append(f"{too}, which cannot cut an image, and are left out; the first: {', '.join(long[:SHOWN])}")
        if long and len(long) == rows - len(account.useless):
            raise ValueError(f"{told[-1]}: give a longer data.seq_len, or smaller images")
        if (lost := len(account.useless) + len(long)) > MOST_LOST * rows and not self.run.data.allow_dropped:
            raise ValueError(
                f"{lost} of {rows} rows{account.of} ({lost / rows:.1%}) would be left out, more than {MOST_LOST:.0%}: "
                "mend them, or leave them out with data.allow_dropped: true (alst run --set data.allow_dropped=true). "
                f"{'. '.join(told)}"
            )
        self.notes += told

    def _read_once(self, corpus: Any, name: str) -> Any:
        """The rows that are trained on, with their images. Each rank reads its share of them once: what cannot be read
        and what is too long is known before the first step. A collective."""
        assert self.images is not None
        rows, ranks, limit, of = len(corpus), dist.get_world_size(), self.run.data.seq_len, f" of '{name}'"
        self.say(f"reading {rows:,} rows{of} and their images")
        pace, account = Pace(self.say, f"reading '{name}'", rows), Account(self.images.document, of)
        mine = []
        with Agreement(SPContext.create(), "reading images", {}, waits=True):
            for number in range(self.rank, rows, ranks):
                document = account(corpus[number], number)
                self.check_tokens(int(document.ids.max(initial=0)))
                if account.trains(document):
                    mine.append((number, len(document.ids)))
                pace(number + 1)
        told = from_all([mine, account.useless])
        read, useless = (sorted(map(tuple, itertools.chain(*parts))) for parts in zip(*told))
        account.rows, account.useless = rows, useless
        long = [f"row {number + 1}, of {size:,} tokens" for number, size in read if size > limit]
        self._leave_out(account, rows, long)
        sizes = {number: size for number, size in read if size <= limit}
        self.longest = max(self.longest, *sizes.values())
        return corpus.select([*sizes])

    def _trainer(self, data: Any, others: Any) -> Any:
        run = self.run
        self.say(f"loading {run.model.name}")
        unplaced = load_on_first(run, self.dtype, self.device, images=self.images is not None)
        if self.images is not None and image_layout(unplaced.model) is None:
            raise ValueError(why_no_images(unplaced.model))
        self.notes += filter(None, [beyond_training(unplaced.model.config.get_text_config(), self.longest)])
        put_liger(run, unplaced.model, self.gpu)
        zero = self.engine.startswith("zero")
        if zero:
            operators.leave_out()
        deepspeed = engine_config(self.with_files() if zero else run, sizes_of(unplaced.model.parameters()), self.bf16)
        check_files(deepspeed if zero else {})
        place(unplaced, deepspeed if zero else {"zero_optimization": {"stage": 0}})
        own = {} if self.images is None else {"packing": False, "remove_unused_columns": False}
        args = SFTConfig(**settings(run, self.engine, self.bf16, self.out / "checkpoints", deepspeed) | own)
        lora = {"task_type": "CAUSAL_LM", "target_modules": "all-linear", **(run.model.lora or {})}
        cls: Any = SPTrainer
        return cls(
            model=unplaced.model, args=args, train_dataset=data, eval_dataset=others, processing_class=self.tokenizer,
            data_collator=self.images, peft_config=None if run.model.lora is None else LoraConfig(**lora),
            sp=run.engine.sp, alst=run.options,
        )  # fmt: skip

    # ----- checkpoints

    def _last_checkpoint(self) -> tuple[str | None, list[str]]:
        """The last whole checkpoint of this configuration, and notes about it. Others are moved aside."""
        folder, notes = self.out / "checkpoints", []
        differ = differences(locks.read_object(folder / "run.json") or {}, fields(self.run), BOUND)
        if folder.exists() and (differ or self.run.output.resume == "never" or finished(self.out, self.run, BOUND)):
            why = ", ".join(differ) or "an earlier run"
            notes.append(f"checkpoints of {why} are kept in {move_aside(folder).name} and not continued")
        folder.mkdir(parents=True, exist_ok=True)
        results.write_json(folder / "run.json", fields(self.run))
        # what is cut off lacks the file that is written last
        steps = [int(file.parent.name[11:]) for file in folder.glob("checkpoint-*/trainer_state.json")]
        if not steps:
            return None, notes
        last = folder / f"checkpoint-{max(steps)}"
        return str(last), [*notes, f"continued from {last.name}"]

    # ----- training

    def __call__(self) -> Json:
        trainer = self.trainer
        self.say("starting the Trainer" + (f" from {self.checkpoint}" if self.checkpoint else ""))
        try:
            trainer.train(resume_from_checkpoint=self.checkpoint)
        finally:
            self.ledger.close()
        if self.ending is not None:
            raise ended(self.ending, self.run, trainer.state.global_step, self.out / "checkpoints")
        return self._metrics(trainer.state.log_history)

    def _metrics(self, history: list[Json]) -> Json:
        run, trainer = self.run, self.trainer
        first = WATCHED if len(self.seconds) > WATCHED else 0
        seconds, tokens, flops = self.seconds[first:], self.tokens[first:], sum(self.flops[first:])
        parameters = list(trainer.model.parameters())

        def logged(name: str, of: str = "loss") -> list[Any]:
            return [line[name] for line in history if of in line]

        return {
            **self.measured(self.ledger, trainer.handle),
            "predicted": self.predicted(FINETUNE, trainer.ctx, run.data.seq_len),
            "seq_len": run.data.seq_len,
            "tokens_per_step": round(statistics.median(tokens)) if tokens else None,
            "tokens_per_second": sum(tokens) / sum(seconds) if seconds else None,
            "tokens_per_second_per_gpu": sum(tokens) / sum(seconds) / trainer.args.world_size if seconds else None,
            "mfu": mfu(flops / sum(seconds) / trainer.ctx.sp, self.device) if seconds and flops else None,
            "step_seconds": seconds,
            "loss": logged("loss"),
            "loss_steps": logged("step"),
            "learning_rate": logged("learning_rate"),
            "eval_loss": logged("eval_loss", of="eval_loss"),
            "eval_steps": logged("step", of="eval_loss"),
            "engine": self.engine,
            "parameters": sum(sizes_of(parameters)),
            "trained_parameters": sum(sizes_of(p for p in parameters if p.requires_grad)),
            "saved_to": run.output.save_to,
            "loaded_by": auto_class(trainer.handle.model.config, self.images is not None).__name__,
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
        unset_hf_deepspeed_config()
        self.say(f"merging the adapter, to {self.run.output.save_to}")
        merged: Any = PeftModel.from_pretrained(
            load_model(self.run, self.dtype, images=self.images is not None), str(adapter)
        )
        merged.merge_and_unload().save_pretrained(self.run.output.save_to)
        self.tokenizer.save_pretrained(self.run.output.save_to)

    # ----- what the trainer calls

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()
        self.ledger.stores = [self.trainer.handle.store]  # the model is attached by now
        self.ledger.__enter__()
        engine = getattr(self.trainer, "deepspeed", None)
        if engine is not None and isinstance(getattr(engine.optimizer, "optimizer", None), torch.optim.AdamW):
            reserve_adam_state(engine)
            self.ledger.mark_host(host_tensors(engine, self.run))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began, self.seen = time.perf_counter(), self.trainer._total_train_tokens

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wait_for(self.device)
        self.ended = time.perf_counter()
        self.seconds.append(self.ended - self.began)
        self.tokens.append(self.trainer._total_train_tokens - self.seen)
        self.flops.append(self.trainer.flops - sum(self.flops))
        if len(self.seconds) == WATCHED and not self.gpu:
            self.ledger.close()
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_evaluate or self.run.data.eval is not None
        elif self.run.output.checkpoint_every:
            self.ending = ending(self.out, max(self.seconds[-10:]), self.saving)
            if self.ending:
                control.should_save = control.should_training_stop = True
        if not control.should_log:
            self._tell(state)

    def on_save(self, *_: Any, **__: Any) -> None:
        self.saving = time.perf_counter() - self.ended

    def on_prediction_step(self, *_: Any, **given: Any) -> None:
        batches = len(given["eval_dataloader"])
        self.evaluated = self.evaluated % batches + 1
        if self.evaluated == 1:
            self.pace = Pace(self.say, "evaluating", batches)
        self.pace(self.evaluated)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            for what in ("loss", "grad_norm"):
                if not math.isfinite(value := logs.get(what, 0.0)):
                    raise FloatingPointError(f"step {state.global_step}: its {what} is {value}")
            self._tell(state, loss=logs["loss"])
        elif "eval_loss" in logs:
            self._tell(state, message=f"evaluation: loss {logs['eval_loss']:.4f}")

    def _tell(self, state: Any, **fields: Any) -> None:
        usual = (time.perf_counter() - self.started) / len(self.seconds)  # with evaluations and checkpoints
        self.progress.emit(
            "step", row=self.run.row, seq_len=self.run.data.seq_len, step=state.global_step,
            steps=state.max_steps, eta_seconds=(state.max_steps - state.global_step) * usual,
            tokens_per_second=self.tokens[-1] / self.seconds[-1], **fields,
        )  # fmt: skip


if __name__ == "__main__":
    run_worker(__doc__, FineTune)
