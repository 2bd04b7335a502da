"""DeepSpeed's Ulysses for transformers (ALST) in the loop of its tutorial, with ZeRO-2 in place of its ZeRO-3."""

from .deepspeed import Stack as DeepSpeed


class Stack(DeepSpeed):
    stage = 2
