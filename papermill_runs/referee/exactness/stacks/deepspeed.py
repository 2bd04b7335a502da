"""DeepSpeed's Ulysses for transformers (ALST) with ZeRO-3, in the loop of its tutorial."""

from __future__ import annotations

from typing import Any

IGNORE = -100


class Stack:
    sources = ("https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism/",)
    requires = ("torch", "transformers", "deepspeed")
    note = (
        "the tutorial's loop: the mean over a micro-batch's labels, and DeepSpeed's mean over micro-batches; samples "
        "get the positions that it asks for, and one token more where ranks do not divide them; its adapter gathers "
        "samples of unequal lengths, which gloo refuses and NCCL may not; the router's loss is not in its loop"
    )

    stage = 3
    """ZeRO's, as in the tutorial."""

    def prepare(self, model: Any, ranks: int, case: Any) -> None:
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from deepspeed.utils import groups

        from alstlib.runs.train import operators

        from ..training import batches_of, collate, optimizer_of

        operators.leave_out()
        deepspeed.init_distributed(dist_backend="gloo")
        base = getattr(model, "get_base_model", lambda: model)()
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=base, core_attn_implementation=base.config._attn_implementation,
            sequence_parallel_size=ranks, micro_batch_size=1, seq_length_is_variable=True,
        )  # fmt: skip
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": case.accumulation,
            "zero_optimization": {"stage": self.stage}, "gradient_clipping": case.clip,
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": case.dtype == "bfloat16"},
        }  # fmt: skip
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config, mpu=mpu)
        self.model, self.case, self.group, self.ranks = model, case, groups._get_sequence_parallel_group(), ranks
        self.collate, self.rank = collate, groups._get_sequence_parallel_rank()
        self.batches = self.adapted([batch for step in batches_of(case) for batch in step])

    def adapted(self, batches: list[dict[str, Any]]) -> Any:
        """What its adapter makes of loaders that give each rank every second sample."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
        from torch.utils.data import DataLoader

        rows: Any = [{n: t[0].tolist() for n, t in batch.items()} for batch in batches]
        rows += rows[: -len(rows) % self.ranks]
        loader: Any = DataLoader(rows[self.rank :: self.ranks], collate_fn=lambda s: self.collate(s, self.ranks))
        return UlyssesSPDataLoaderAdapter(
            loader, sp_rank=self.rank, sp_group=self.group, sp_world_size=self.ranks, device="cpu"
        )

    def step(self, batches: list[dict[str, Any]]) -> float:
        from torch.distributed.nn.functional import all_gather

        means = []
        for at, _ in enumerate(batches):
            batch = next(self.batches)
            outputs = self.engine(**batch, use_cache=False)
            labels = batch["shift_labels"]
            loss = self.engine.module.loss_function(
                logits=outputs.logits, labels=None, shift_labels=labels, vocab_size=self.model.config.vocab_size
            )
            losses, good = all_gather(loss, self.group), all_gather((labels != IGNORE).view(-1).sum(), self.group)
            total = sum(one * n for one, n in zip(losses, good) if n > 0)
            mean = total / max(sum(good), 1) * self.case.scale
            self.engine.backward(mean)
            means.append(float(mean))
            if at + 1 < len(batches):
                self.engine.step()  # DeepSpeed counts: it steps at the last micro-batch only
        return sum(means) / len(means)

    def gradients(self) -> dict[str, Any]:
        from ..training import deepspeed_gradients

        return deepspeed_gradients(self.model)

    def update(self) -> float:
        self.engine.step()
        return float(self.engine.get_global_grad_norm())
