"""Checks of lesson 00, where the memory goes."""

from collections.abc import Callable

import torch
from step_profiles import memory_profile
from transformers import AutoModelForCausalLM, LlamaConfig

from alstlib.base.config import RunConfig
from alstlib.base.units import format_bytes
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.model_states import GRADIENTS, OPTIMIZER, WEIGHTS, Sizes, model_states
from checks import Exercise


def check_states(state_bytes: Callable[[int, int, int, bool], tuple[int, int]]) -> str:
    tried = 0
    for parameters in (1000, 1001, 8_030_261_248):
        for gpus in (1, 3, 8):
            for stage, offload in ((0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)):
                run = RunConfig(model={"dtype": "bf16"}, engine={"zero_stage": stage, "offload_optimizer": offload})
                held = model_states(run, Sizes(parameters=parameters, layer=0, embedding=0), gpus, 2)
                want = tuple(
                    sum(side.get(n, 0) for n in (WEIGHTS, GRADIENTS, OPTIMIZER)) for side in (held.device, held.host)
                )
                got = tuple(state_bytes(parameters, gpus, stage, offload))
                for where, mine, right in zip(("device", "host"), got, want):
                    assert mine == right, (
                        f"state_bytes({parameters}, {gpus}, {stage}, {offload}): {mine:,} bytes on the {where} are "
                        f"{'too few' if mine < right else 'too many'}"
                    )
                tried += 1
    return f"{tried} combinations agree with the planner"


def every_stage_divides_all(parameters: int, gpus: int, stage: int, offload: bool) -> tuple[int, int]:
    part = -(-parameters // gpus)
    return (2 * part, 18 * part) if offload else (16 * part, 0)


def host_without_fp32_gradients(parameters: int, gpus: int, stage: int, offload: bool) -> tuple[int, int]:
    part = -(-parameters // gpus)
    weights, gradients = 2 * (part if stage == 3 else parameters), 2 * (part if stage > 1 else parameters)
    if offload:
        return weights + (gradients if stage == 1 else 0), 14 * part
    return weights + gradients + 12 * (part if stage else parameters), 0


def rounded_down(parameters: int, gpus: int, stage: int, offload: bool) -> tuple[int, int]:
    part = parameters // gpus
    weights, gradients = 2 * (part if stage == 3 else parameters), 2 * (part if stage > 1 else parameters)
    if offload:
        return weights + (gradients if stage == 1 else 0), 18 * part
    return weights + gradients + 12 * (part if stage else parameters), 0


def check_tokens(answer: Callable[[], float]) -> str:
    shape, tokens = read_shape("meta-llama/Llama-3.1-8B"), answer()
    copy, weights = torch.empty(round(tokens), shape.vocab, device="meta").nbytes, 2 * shape.parameters
    assert abs(copy / weights - 1) < 0.01, (
        f"{tokens:,} tokens have {format_bytes(copy)} of logits: not the weights' size"
    )
    return f"{format_bytes(copy)} of logits, {format_bytes(weights)} of weights"


def check_longest(answer: Callable[[], int]) -> str:
    longest = answer()
    assert longest % 64 == 0, f"{longest} is no multiple of 64"
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def peak(length: int) -> int:
        optimizer.zero_grad()
        x = torch.arange(length)[None] % 8192
        return memory_profile(model, lambda: model(input_ids=x, labels=x).loss, optimizer).peak_bytes

    peak(64)  # the first step makes the moments
    at, more, device = peak(longest), peak(longest + 64), 320 * 2**20
    assert at <= device, f"{longest} tokens peak at {format_bytes(at)}, more than 320 MiB"
    assert more > device, f"64 tokens more than {longest} fit as well"
    return f"{longest} tokens peak at {format_bytes(at)}, and 64 more at {format_bytes(more)}"


EXERCISES = {
    1: Exercise(
        check=check_states,
        hints=(
            "begin with stage 0 on one device: 2 bytes of weights, 2 of gradients, 12 of master weights and moments",
            "let part be the parameters over the GPUs, rounded up; the stage says for each of the three whether a rank "
            "holds part or all of it",
            "with offload the device keeps its weights (and all gradients in stage 1 only); the host gets 18 bytes "
            "for each parameter of the rank's part",
        ),
        mistakes=(every_stage_divides_all, host_without_fp32_gradients, rounded_down),
    ),
    2: Exercise(
        check=check_tokens,
        hints=(
            "the weights take 2 bytes for each parameter, and a token's logits 4 bytes for each word",
            "llama.parameters and llama.vocab have the numbers",
        ),
        mistakes=(lambda: 8_030_261_248 // 128_256, lambda: 8_030_261_248 // (4 * 128_256)),
    ),
    3: Exercise(
        check=check_longest,
        hints=(
            "the peak is a constant plus so many bytes for each token: a line",
            "profiles[512].peak_bytes and profiles[1024].peak_bytes give its slope and its constant",
        ),
        mistakes=(lambda: 960, lambda: 1088, lambda: 1000),
    ),
}  # fmt: skip
