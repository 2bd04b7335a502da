"""Answers for `planner.fits`: the sizes of any model, and what its step takes at any length, from simulated steps.
`python -m alstlib.planner.measure.answers` answers the question on standard input; the answer is the last line."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from alstlib.base.config import Model, RunConfig
from alstlib.hf.experts import unknown_experts
from alstlib.hf.loading.models import share_of_token, windows_of
from alstlib.hf.support import check_model
from alstlib.linear.adapters import adapter_of, mixers_of
from alstlib.linear.ways import StateLayer
from alstlib.planner.fits import FORWARD, KERNEL, REFERENCE, Moment, StepQuestion
from alstlib.planner.measure.deep import PROBE, Deep
from alstlib.planner.measure.scope import ATTENTION, STATES, category
from alstlib.planner.measure.simulate import whole_model
from alstlib.planner.measure.towers import tower


def answer(what: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What `fits` asks for: the moments between two lengths (`span`), the sizes of a model (`facts`), or what images
    take (`tower`)."""
    if what == "facts":
        return count(**asked)
    fields = dict(asked)
    about = fields.pop("tokens" if what == "span" else "size")
    question = StepQuestion.from_dict(fields)
    return span(question, about) if what == "span" else tower(question.run, question.device, about and tuple(about))


@functools.lru_cache(maxsize=4)
def _deep(question: str, text: str) -> Deep:
    """A search asks about many lengths of one model, which is built once for all of them, unless its config or its code
    changes, which are in the `text`."""
    asked = StepQuestion.from_dict(json.loads(question))
    return stack_of(asked.preset)(asked.run, asked.ranks, asked.device, asked.capability, asked.images)


def _deep_of(question: StepQuestion) -> Deep:
    """What simulates it: with kept outputs of attention and without, the layers are the same."""
    save = {"save_attention": question.run.options.save_attention}
    either = replace(question, run=question.run.replace(options={"save_attention": False}))
    deep = _deep(json.dumps(either.to_dict(), sort_keys=True), either.text)
    deep.run = deep.run.replace(options=save)
    return deep


def stack_of(preset: str) -> type[Deep]:
    """What simulates a preset: our own stack, or that of the `paper`, which the repository has and the package not.

    Raises:
        ValueError: the package was installed without the repository.
    """
    if preset == "ours":
        return Deep
    if not REFERENCE.is_file():
        raise ValueError(
            f"preset '{preset}' simulates with {REFERENCE.name} in papermill_runs/referee/ of the repository, which is "
            "not beside this package: plan from a clone of it, or use preset 'ours'"
        )
    if (folder := str(REFERENCE.parent)) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(REFERENCE.stem).ReferenceStack


def span(question: StepQuestion, tokens: int) -> dict[str, Any]:
    """The moments of steps with about so many tokens on a rank: `from` and `to` tokens, for which the lines hold
    (`Deep.lengths`)."""
    deep = _deep_of(question)
    lengths, low, high = deep.lengths(tokens)
    found = deep.each(tokens * deep.ranks for tokens in lengths)
    first, then, further = found[0], found[-1], lengths[-1] - lengths[0]

    def line(here: float, there: float) -> tuple[float, float]:
        slope = (there - here) / further if further else 0.0
        return here - slope * lengths[0], slope

    parts: dict[str, list[tuple[float, float, str, Moment]]] = defaultdict(list)
    for key, here in first.moments.items():
        if (there := then.moments.get(key)) is not None:
            of = {n: line(here.get(n, 0), there.get(n, 0)) for n in sorted({*here, *there})}
            place = key.partition("|")[0].removesuffix(FORWARD).removesuffix(KERNEL)
            one = Moment(place, KERNEL in key, of, "forward" if FORWARD in key else "")
            base, slope = (sum(numbers) for numbers in zip((0.0, 0.0), *of.values()))
            parts[one.part].append((base + low * slope, slope, key, one))
    kept = []
    for moments in parts.values():  # without those than which another one of the part is larger at every length
        steepest = -1.0
        for _, slope, _, one in sorted(moments, reverse=True, key=lambda moment: moment[:3]):
            if slope > steepest:
                steepest = slope
                kept.append([one.place, one.kernel, one.line, *filter(None, [one.when])])
    return {"from": low, "to": high, "host": line(first.host_peak, then.host_peak), "moments": kept}


def count(name: str, overrides: Mapping[str, Any], trust: bool, images: bool = False) -> dict[str, Any]:
    """The fields of a `Shape`, from the model itself on meta."""
    run = RunConfig(model=Model(name=name, config=dict(overrides), trust_remote_code=trust, dtype="bf16"))
    with torch.device("meta"):
        model: Any = whole_model(run, "cuda", images)
    facts, config = check_model(model, "auto"), model.config.get_text_config()
    mixing = mlps = 0.0
    for i, layer in enumerate(facts.layers):
        mixes = i in facts.attending or mixers_of(layer)
        for path, p in layer.named_parameters():
            if p.ndim > 1 and mixes and category(f".{i}.{path.rpartition('.')[0]}") in (ATTENTION, STATES):
                mixing += p.numel()
            elif p.ndim > 1:
                mlps += p.numel() * share_of_token(layer, path, p.shape, config)
    window, windowed = windows_of(config, len(facts.layers), facts.attention_chunk)
    head, linear = model.get_output_embeddings().weight, Counter[str]()
    for path, m in model.named_modules():
        if isinstance(m, nn.Linear | Conv1D) and m.weight is not head:
            linear[path.rpartition(".")[2]] += sum(m.weight.shape)
    refused = {"not_by_blocks": facts.not_by_blocks, "unknown_experts": unknown_experts(facts.layers)}
    mlp, sizes = getattr(config, "intermediate_size", 0), [p.numel() for p in model.parameters()]
    return {
        "family": config.model_type, "vocab": head.shape[0], "width": head.shape[1],
        "mlp": mlp if isinstance(mlp, int) else 0,
        "layers": len(facts.layers), "heads": facts.output.heads, "kv_heads": facts.most.kv_heads,
        "head_dim": facts.most.widths - facts.output.value_width, "value_dim": facts.output.value_width,
        "window": window, "windowed": windowed,
        "softcap": getattr(config, "attn_logit_softcapping", None) is not None, "attending": len(facts.attending),
        "parameters": sum(sizes), "largest_tensor": max(sizes),
        "layer_parameters": max(sum(p.numel() for p in layer.parameters()) for layer in facts.layers),
        "mixing": round(mixing), "mlp_of_token": round(mlps), "linear": dict(linear),
        "recurrence": _recurrence(run, [mixers for layer in facts.layers if (mixers := mixers_of(layer))]),
        **{name: why for name, why in refused.items() if why},
    }  # fmt: skip


def _recurrence(run: RunConfig, layers: Sequence[Sequence[nn.Module]]) -> dict[str, Any] | None:
    """The fields of a `Recurrence`, from the mixers of the layers that have some, and from a step of two ranks where
    one has heads."""
    if not layers:
        return None
    convolutions = [m for mixer in layers[0] for m in mixer.modules() if isinstance(m, nn.Conv1d)]
    met: tuple[StateLayer, ...] = ()
    if any(adapter.heads for mixers in layers for adapter in map(adapter_of, mixers) if adapter):
        deep = Deep(run, 2)
        met = deep.shallow(deep.chosen, 2 * PROBE).recurrences
    return {
        "layers": len(layers),
        "tail": sum(m.in_channels * (m.kernel_size[0] - 1) for m in convolutions),
        "layer": asdict(met[0]) if met else None,
    }


if __name__ == "__main__":
    print(json.dumps(answer(*json.load(sys.stdin))))
