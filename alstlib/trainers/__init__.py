"""Mixins that put an attached model before Hugging Face's trainers.

`trainer` (`TrainerMixin`) is for Trainer and SFTTrainer, `dpo_trainer` for TRL's DPOTrainer, and `grpo_trainer` for its
GRPOTrainer and RLOOTrainer; `logps_trainer` has what the last two share. `trainer_checks` refuses what they could not
train exactly, `sampling` gives all ranks of a group the same order of samples, and `predictions` shows an evaluation
what all ranks predicted.
"""
