"""Accelerate's sequence parallelism (DeepSpeed's Ulysses) under transformers' Trainer, with ZeRO-2."""

from .accelerate_sp import Stack as AccelerateSP


class Stack(AccelerateSP):
    stage = 2
