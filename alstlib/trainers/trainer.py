"""Sequence parallelism for Hugging Face's Trainer and TRL's SFTTrainer, as a mixin that is written before them.

    class SPTrainer(alstlib.TrainerMixin, SFTTrainer): ...
    trainer = SPTrainer(model=model, args=args, train_dataset=data, sp=8, alst=alstlib.Options(offload=True))

The Trainer still does everything else: engines, LoRA, schedules, callbacks, evaluation, checkpoints, resume. The mixin
replaces only what changes when a sample is divided among ranks:

- *Batches.* The `sp` ranks of an SP group are one replica: they read the same batches, in the order that the Trainer
  would have with as many processes as there are replicas. `per_device_train_batch_size` counts the samples of a
  replica, and each rank cuts its slice when an optimizer step begins.
- *Loss.* The sum of token losses over the valid tokens of the whole optimizer step: all ranks, micro-batches and
  replicas. The logged loss is the mean over these tokens. The load-balancing loss of a mixture of experts is that of a
  replica's whole sequences, added as the Trainer adds it.
- *Evaluation.* Ranks evaluate slices too; the Trainer gathers the results of replicas.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import RandomSampler
from transformers.utils import TransformersKwargs

from alstlib.base.mesh import SPContext
from alstlib.base.options import Json, Options, Record
from alstlib.base.recompute import leaves_of, own_random
from alstlib.base.units import IGNORE
from alstlib.data.agreement import share_step
from alstlib.data.images import IMAGE_KEYS, ImageLayout
from alstlib.data.shard import KEYS, SLICED, Batch, documents_of
from alstlib.hf.attach import apply
from alstlib.hf.causal_lm_loss import causal_lm_loss
from alstlib.hf.handle import Handle
from alstlib.hf.inputs import PACKED
from alstlib.hf.loading.models import flop_dimensions, flos, mfu
from alstlib.hf.token_logps import OverRanks
from alstlib.hf.vision import features_made
from alstlib.tiled.loss import Look
from alstlib.trainers.predictions import Shown
from alstlib.trainers.sampling import SharedOrder, spread_neftune
from alstlib.trainers.trainer_checks import (
    Slice,
    advice,
    check_arguments,
    check_class,
    check_resume,
    check_seeds,
    offloads,
)

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

log = logging.getLogger(__name__)


class TrainerMixin(Base):
    """Gives a Trainer sequence parallelism: `class SPTrainer(alstlib.TrainerMixin, Trainer)`, in this order.

    Args:
        sp: the sequence-parallel degree: the number of ranks that share one sample. It must divide the number of
            processes. None takes `sp_size` from Accelerate's `parallelism_config`, or 1 without one.
        alst: what `alstlib.apply` attaches; None is `Options()`.
        All other arguments go to the Trainer.

    Attributes:
        ctx: the mesh of ranks (`SPContext`).
        handle: what `apply` returned; it is set when training or evaluation begins.

    Raises:
        ValueError: before training, where the Trainer's arguments cannot be run exactly; the message says what to write
            instead.
    """

    LOSS_OF: tuple[str, ...] = ("Trainer", "SFTTrainer")
    """Trainers of transformers and TRL whose loss is the one computed here."""

    def __init__(self, *args: Any, sp: int | None = None, alst: Options | None = None, **kwargs: Any) -> None:
        self.sp, self.alst = sp, alst or Options()
        if not isinstance(self.alst, Options):
            raise ValueError(f"alst={alst!r} must be an alstlib.Options, such as alstlib.Options(offload=True)")
        self.handle: Handle | None = None
        check_class(type(self), TrainerMixin, self.LOSS_OF)
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is not None and given.ddp_find_unused_parameters is None:
            # SFTTrainer would switch it on for models that read images: their tower has no gradient in a step without
            # any. Here it runs in every step.
            given.ddp_find_unused_parameters = False
        super().__init__(*args, **kwargs)
        if offloads(self.args) and not self.alst.offload:
            self.alst = self.alst.replace(offload=True)
        self._counting_since: float | None = None
        """When the steps began that are logged next; None: none of them did."""
        self._advised = False
        """Whether a warning about the batches was given."""
        self._counted = 0
        """The tokens of these steps."""
        self.flops = 0.0
        """The model's FLOPs of the steps so far: of the samples of this rank's group, without padding and recompute
        (`models.flos`); 0 of a model that reads images."""
        self._flops_logged = 0.0
        self._dimensions: Json = {}

    # ----- the mesh

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args = self.args
        found, args.parallelism_config = args.parallelism_config, None
        if os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true" and found is None:
            from accelerate import ParallelismConfig

            found = ParallelismConfig()
        if found is not None:
            self._take_over(found)
        # A recomputed layer looks to DDP like parameters that are used twice, unless it looks for none.
        args.ddp_find_unused_parameters = bool(args.ddp_find_unused_parameters)
        return super()._build_accelerator_args(**kwargs)

    def _take_over(self, found: Any) -> None:
        """Accelerate's own sequence parallelism stays off, and its degree is ours."""
        name, own = ("cp_size", "context") if found.cp_size > 1 else ("sp_size", "DeepSpeed's sequence")
        degree = found.sp_size * found.cp_size
        if found.tp_size > 1 or (self.sp is not None and degree not in (1, self.sp)):
            raise ValueError(
                f"parallelism_config has tp_size={found.tp_size}, cp_size={found.cp_size} and sp_size={found.sp_size}: "
                f"TrainerMixin supports cp_size and sp_size only, which must be sp={self.sp} where both are given"
            )
        if self.sp is None:
            self.sp = degree
            log.warning("parallelism_config: %s=%d is used by alstlib, in place of %s parallelism", name, degree, own)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(
                "several processes were started, but Accelerate did not connect them, as on a machine without a GPU: "
                "use TrainingArguments(use_cpu=True)"
            )
        ctx = self.ctx = SPContext.create(1 if self.sp is None else self.sp)
        self._replicas = None  # the group of the ranks that hold this rank's slice of other samples
        if ctx.dp > 1:
            self._replicas = dist.group.WORLD if ctx.sp == 1 else ctx.mesh.get_group("dp")
        self.accelerator.prepare_data_loader = self._prepare_data_loader

    def _validate_args(self) -> None:
        super()._validate_args()
        check_arguments(self)

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // self.ctx.sp

    # ----- batches

    def _prepare_data_loader(self, loader: Any, *_: Any, **__: Any) -> Any:
        """Accelerate's loader for a replica in place of a process; batches stay on the CPU until they are cut."""
        from accelerate.data_loader import prepare_data_loader

        accelerator = self.accelerator
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        start = loader.worker_init_fn
        if isinstance(start, functools.partial) and "rank" in start.keywords:  # workers draw alike in a group
            loader.worker_init_fn = functools.partial(start.func, **{**start.keywords, "rank": self.ctx.dp_rank})
        made = prepare_data_loader(
            loader, num_processes=self.ctx.dp, process_index=self.ctx.dp_rank, put_on_device=False,
            split_batches=accelerator.split_batches, rng_types=accelerator.rng_types.copy(),
            even_batches=accelerator.even_batches, use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )  # fmt: skip
        accelerator._dataloaders.append(made)
        return made

    def get_train_dataloader(self) -> Any:
        check_seeds(self)
        return super().get_train_dataloader()

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if sampler is None or (isinstance(sampler, RandomSampler) and self.accelerator.use_seedable_sampler):
            return sampler
        return SharedOrder(sampler, self.args.seed if self.args.data_seed is None else self.args.data_seed)

    def _set_signature_columns_if_needed(self) -> None:
        known = self._signature_columns is not None
        super()._set_signature_columns_if_needed()
        if not known and "SFTTrainer" not in {cls.__name__ for cls in type(self).__mro__}:
            columns: Any = self._signature_columns
            columns += [name for name in KEYS if name not in columns]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *_: Any) -> tuple[list[Batch], Any]:
        """The slices of one optimizer step, and the number of items by which the Trainer would divide its loss."""
        if self._counting_since is None:
            self._counting_since, self._counted = time.perf_counter(), 0
        slices = self._share(islice(epoch_iterator, num_batches))
        self._counted += sum(int(part.get("seen_tokens", 0)) for part in slices)
        if self._dimensions:
            lengths = (n for part in slices for n in documents_of(part, self.ctx.sp))
            self.flops += sum(flos(n, n, **self._dimensions)["model"] for n in lengths)
        return slices, self._items(slices[0]) if slices else None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Also the speed of the steps since the last log, and the share of the GPU's peak that it is where the GPU is
        known; evaluations and checkpoints between steps do not count."""
        if "loss" in logs and self._counting_since is not None and self._counted:
            seconds, self._counting_since = time.perf_counter() - self._counting_since, None
            logs["tokens_per_second_per_gpu"] = self._counted / seconds / self.args.world_size
            done, self._flops_logged = self.flops - self._flops_logged, self.flops
            if done and (share := mfu(done / seconds / self.ctx.sp, self.args.device)) is not None:
                logs["mfu"] = share
        super().log(logs, *args, **kwargs)

    def _share(self, batches: Iterable[Any]) -> list[Any]:
        lengths: list[int] = []

        def rows() -> Iterator[Batch]:
            for batch in batches:
                yield (read := self._known(batch))
                lengths.append(len(read["input_ids"][0]))

        return [
            {**part, "sample_length": n}
            for part, n in zip(
                share_step(rows(), self.ctx, self.args.gradient_accumulation_steps, self._images), lengths
            )
        ]

    @property
    def _images(self) -> ImageLayout | None:
        return None if self.handle is None else self.handle.images

    def _known(self, batch: Any) -> Batch:
        """A collator's batch without what says the same twice, and without what the model's forward does not take."""
        plain = without_adapters(self.model)
        model, model_config = type(plain), plain.config.get_text_config()
        known = (*TransformersKwargs.__annotations__, "shift_labels")  # what attention and loss find among all else
        keys = (*KEYS, *(IMAGE_KEYS if self._images else ()))
        takes = {*keys, *PACKED, *known, *inspect.signature(model.forward).parameters}
        if dropped := [name for name in batch if name not in takes]:
            _say_once(f"{model.__name__} does not take {', '.join(dropped)} of the batch: left out of the inputs")
        more = takes.difference(keys, PACKED)
        if lost := [name for name, value in batch.items() if name in more and value is not None]:
            raise ValueError(
                f"{model.__name__} would read {', '.join(lost)} of the batch, but ranks that share a sample only read "
                f"{', '.join(keys)}: drop them in the collate_fn"
            )
        if not self._advised:
            for text in advice(model_config, batch):
                self._advised = True
                log.warning(text)
        twice = PACKED if batch.get("position_ids") is not None else ()  # documents, said a second time
        return {name: value for name, value in batch.items() if name in takes and name not in twice}

    def _items(self, inputs: Record) -> Any:
        """The tokens with a label of the step that this slice is of, a number on the CPU; None where the Trainer does
        not count them."""
        return inputs["step_tokens"] if self.model_accepts_loss_kwargs else None

    def _prepare_inputs(self, inputs: Any) -> Any:
        if "step_tokens" not in inputs:
            return super()._prepare_inputs(inputs)
        return Slice({name: t.to(self.args.device) if name in SLICED else t for name, t in inputs.items()})

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.args.include_num_input_tokens_seen != "non_padding" or "seen_tokens" not in inputs:
            return super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen += int(inputs["seen_tokens"])

    # ----- the model

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        check_resume(self, kwargs.get("resume_from_checkpoint", args[2] if len(args) > 2 else None))
        self._attach()
        if self.neftune_noise_alpha is not None and self.ctx.sp > 1 and self.handle is not None:
            self.neftune_hook_handle.remove()
            self.neftune_hook_handle = spread_neftune(self.handle)
        return super()._prepare_for_training(*args, **kwargs)

    def _attach(self) -> None:
        """Attach the model before an engine wraps it; adapters stay outside."""
        base = without_adapters(self.model)
        if self.handle is not None and not self.handle.plain and any(m is self.handle.model for m in base.modules()):
            return
        # a model without a head is refused by `apply`, which says why
        dimensions = {} if base.get_output_embeddings() is None else flop_dimensions(base)
        self.handle = apply(base, self.ctx, self.alst)
        # layers with a state have no pairs; their recurrence is not counted
        attending = {"layers": len(self.handle.facts.attending)}
        self._dimensions = {} if self.handle.images else {**dimensions, **attending}
        if self.ctx.world_size > 1 and not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            # DDP would wait for their gradients
            model: Any = self.model
            unused = never_trained(self.handle)
            names = [name for name, p in model.named_parameters() if p in unused]
            if names:
                names += getattr(model, "_ddp_params_and_buffers_to_ignore", [])
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        self.handle.generates = True  # no slice ever reaches a callback that generates

    def detach(self) -> nn.Module:
        """Return the model as it was before training: taken out of the engine, with nothing attached."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if self.handle is not None:
            self.handle.detach()
        return model

    # ----- the loss

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:  # fmt: skip
        loss = self._loss(model, inputs, num_items_in_batch)
        return (loss, {"loss": loss}) if return_outputs else loss

    def _loss(self, model: nn.Module, inputs: Record, items: Any, look: Look | None = None) -> Tensor:
        """What the Trainer's own loss is for the samples of this rank's group: the sum over their tokens, divided by
        the number of items and times the replicas, or their mean."""
        me: Any = self
        trl, dft = getattr(me, "_metrics", None), getattr(self.args, "loss_type", None) == "dft"
        smoothing = 0.0 if dft else self.args.label_smoothing_factor
        mean = items is None
        if mean:
            items = self.ctx.dp * self._tokens_of_group(inputs)
        out = causal_lm_loss(
            model, {**inputs, "step_tokens": items}, engine_divides_by=1, statistics=trl is not None,
            label_smoothing=smoothing, look=look, dft=dft,
            router_tokens=0.0 if smoothing else self._router_tokens(items, mean),
        )  # fmt: skip
        if trl is not None and out.entropy is not None and out.accuracy is not None:  # what SFTTrainer logs
            mode = "train" if me.model.training else "eval"
            trl[mode]["entropy"].append(out.entropy.item())
            trl[mode]["mean_token_accuracy"].append(out.accuracy.item())
            if out.router is not None:
                trl[mode]["aux_loss"].append(self._gather_replicas(out.router, repeated=True).mean().item())
            if mode == "train":
                me._total_train_tokens += int(inputs["seen_tokens"])
            trl[mode]["num_tokens"] = [me._total_train_tokens]
        return OverRanks.apply(out.loss / self.ctx.sp, self.ctx)

    def _tokens_of_group(self, inputs: Record) -> int:
        tokens = inputs["shift_labels"].ne(IGNORE).sum()
        if self.ctx.sp > 1:
            dist.all_reduce(tokens, group=self.ctx.sp_group)
        return int(tokens)

    def _router_tokens(self, items: Any, mean: bool) -> float:
        """As how many tokens a mixture's load-balancing loss counts, where the loss is divided by so many items:
        Trainer adds the sum over micro-batches and replicas, SFTTrainer, where it weighs the loss itself, the mean, and
        with label smoothing both leave it out. It is added whole to a micro-batch's mean."""
        parts = self.ctx.dp if mean or hasattr(self, "router_aux_loss_coef") else 1
        if not mean and hasattr(self, "router_aux_loss_coef"):
            parts *= self.current_gradient_accumulation_steps
        return max(1, int(items)) / parts

    # ----- evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._attach()
        self.gather_function = self._gather_replicas
        self._shown, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.preprocess_logits_for_metrics = self._shown

    def _gather_replicas(self, data: Any, repeated: bool = False) -> Any:
        """The values of every replica, without those of samples that were repeated to fill the last batch, unless these
        are asked for too. A number gives one value for each replica."""
        from accelerate.utils import recursively_apply

        state = self.accelerator.gradient_state
        surplus = state.end_of_dataloader and state.remainder > 0 and not repeated

        def gather(part: Tensor) -> Tensor:
            number = part.ndim == 0
            if self._replicas is not None:
                parts = [torch.empty_like(part) for _ in range(self.ctx.dp)]
                dist.all_gather(parts, part.contiguous(), group=self._replicas)
                part = torch.stack(parts) if number else torch.cat(parts)
            return part[: state.remainder] if surplus and not number else part

        return recursively_apply(gather, data)

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss of a replica's batch (the mean over its valid tokens), and if asked for its logits [B, S, V], or what
        `preprocess_logits_for_metrics` makes of them, tile by tile: that must work token by token."""
        labels, ctx = inputs.get("labels"), self.ctx
        given = self._known(inputs)
        if labels is None:
            given["labels"] = torch.full_like(given["input_ids"], IGNORE)
        batch = self._prepare_inputs(*share_step([given], ctx, images=self._images))
        assert self.handle is not None
        shown = None if prediction_loss_only else Shown(ctx, self.handle.chunk, given["labels"], batch, self._shown)
        items = None if hasattr(self, "_metrics") else self._items(batch)  # SFTTrainer evaluates means
        loss = None
        with torch.no_grad(), self.compute_loss_context_manager():
            if labels is not None and type(self).compute_loss is not TrainerMixin.compute_loss:
                loss = self.compute_loss(model, batch, num_items_in_batch=items)
            if loss is None or shown is not None:  # a loss of the user's own need not show its logits
                found = self._loss(model, batch, items, shown)
                if labels is not None and loss is None:
                    loss = (
                        found if items is None else found / items.clamp(max=1)
                    )  # nan without labels, as the Trainer's
        if shown is None:
            return loss, None, None
        return loss, shown.whole(), None if labels is None else labels.to(self.args.device)


@functools.cache
def _say_once(text: str) -> None:
    log.warning(text)


def without_adapters(model: Any) -> Any:
    """The model itself where peft's adapters wrap it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def never_trained(handle: Handle) -> set[nn.Parameter]:
    """The parameters of the tower that no feature depends on, as of a last layer behind the one whose output is read:
    they have no gradient in plain transformers either. Runs the tower on a blank image."""
    if handle.images is None:
        return set()
    model, ran = handle.model, set[nn.Module]()
    inner: Any = model.base_model
    blank = {n: t.to(model.device, model.dtype if t.is_floating_point() else t.dtype)
             for n, t in handle.images.joined([]).items()}  # fmt: skip
    with (
        handle.as_its_own(), own_random(model.device), torch.enable_grad(),
        register_module_forward_pre_hook(lambda module, _: ran.add(module)),
    ):  # fmt: skip
        features = features_made(inner.get_image_features(**blank))
    used = {id(p) for p in leaves_of([t for t in features if t.requires_grad])}
    # of a module that does not run here, such as the projector of Llama 4, nothing is known
    return {p for m in ran for p in m.parameters(recurse=False) if p.requires_grad and id(p) not in used}
