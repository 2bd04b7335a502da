"""The models of runs (built-in shapes with random weights, hub names, local paths) and the sizes from which FLOPS are
counted."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from packaging.version import Version
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, PreTrainedModel

from alstlib.base.config import RunConfig
from alstlib.base.mesh import accelerator
from alstlib.base.options import Json, Record, check_names
from alstlib.base.peaks import PEAKS, gpu_named
from alstlib.base.sizing import causal_pairs, heads_of
from alstlib.hf.loading.configs import check_model, overridden, published
from alstlib.hf.loading.public_models import PUBLIC, SHAPES


def model_config(name: str, overrides: Record, trust_remote_code: bool = False, *, shape_only: bool = False) -> Any:
    """The transformers config of a built-in shape, a local path or a hub name, with fields overridden. With
    `shape_only`, published shapes (`public_models.PUBLIC`) need no hub: their sizes are right, other fields are
    defaults.

    Raises:
        ValueError: an unknown model (with the nearest built-in name) or an unknown field (with the nearest known one).
    """
    if name in SHAPES:
        config: Any = LlamaConfig(**SHAPES[name])
    elif shape_only and (public := published(name)) is not None:
        config = AutoConfig.for_model(**PUBLIC[public])
    else:
        check_model(name)
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as e:
            raise ValueError(f"model='{name}': its config cannot be read: {str(e).partition(chr(10))[0]}") from e
    fields = config.to_dict()
    check_names(overrides, fields, "field of model.config")
    made = overridden(fields, overrides)
    for field in {*overrides, *({"head_dim"} & set(fields))}:
        setattr(config, field, made[field])
    return config


def has_random_weights(run: RunConfig) -> bool:
    return run.model.name in SHAPES if run.model.random_weights is None else run.model.random_weights


def auto_class(config: Any, images: bool) -> Any:
    """What of transformers loads a model: the decoder alone, if it is one by itself and reads no images; else the model
    that reads images and text, where there is one."""
    both = type(config) in AutoModelForImageTextToText._model_mapping
    alone = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if both and (images or not alone) else AutoModelForCausalLM


def load_model(
    run: RunConfig, dtype: torch.dtype, *, shape_only: bool = False, images: bool = False
) -> PreTrainedModel:  # fmt: skip
    """The run's model, in training mode: pre-trained, or with random weights that its seed decides. With `shape_only`
    nothing is read but its config (see `model_config`); with `images` it is to read images (see `auto_class`)."""
    config = model_config(run.model.name, run.model.config, run.model.trust_remote_code, shape_only=shape_only)
    auto = auto_class(config, images)
    random = shape_only or has_random_weights(run)
    if random:
        torch.manual_seed(run.optim.seed)
        model = auto.from_config(config, dtype=dtype, trust_remote_code=run.model.trust_remote_code)
    else:
        try:
            found: Any = auto.from_pretrained(
                run.model.name,
                config=config,
                dtype=dtype,
                trust_remote_code=run.model.trust_remote_code,
                output_loading_info=True,
            )
            model, loaded = found
        except (SafetensorError, RuntimeError) as e:
            raise ValueError(
                f"model='{run.model.name}': its weights cannot be loaded, because its files are damaged or were cut "
                f"off, or its config or model.config asks for other sizes: {e}"
            ) from e
        if missing := sorted(loaded["missing_keys"]):
            raise ValueError(
                f"model='{run.model.name}' has no weights for {missing[0]} and {len(missing) - 1} more, which would be "
                "random: model.config must not make the model larger than its weights, or random_weights must be True"
            )
        _check_finite(run, model)
    return model.train()


def _check_finite(run: RunConfig, model: PreTrainedModel) -> None:
    """Refuse weights that are not finite: some are met by no token until a state is saved. `aminmax` hands on NaN,
    makes no copy, and read 13 GB/s on one core, where `isfinite` read 0.3."""
    for name, p in model.named_parameters():
        floats = p.is_floating_point() and p.itemsize > 1 and p.numel()
        if floats and not all(map(torch.isfinite, p.detach().aminmax())):
            raise ValueError(
                f"model='{run.model.name}': its weight {name} is not finite: it has NaN or infinity; mend the files of "
                "the model, or copy them again"
            )


def flop_dimensions(model: PreTrainedModel) -> Json:
    """The arguments of `flos` that a model decides: dense_params (elements of the matrices of layers and head that
    multiply a token, without tables that are looked up and experts that it does not go to), those of them that are
    frozen, heads, head_dim, layers, and windows: a sliding window, and how many layers have it.

    Call it before `apply`, and before an engine other than ZeRO-3 shards the weights.
    """
    config = model.config.get_text_config()
    head, layers = model.get_output_embeddings().weight, config.num_hidden_layers
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is not head}
    routed = experts_of_token(config)
    dense = frozen = 0
    for path, p in model.named_parameters():
        # a weight that ZeRO-3 has in parts, or bitsandbytes in 4 bits
        known = getattr(p, "ds_shape", None) or getattr(getattr(p, "quant_state", None), "shape", None)
        if len(shape := known or p.shape) > 1 and id(p) not in tables:
            multiplied = round(math.prod(shape) * (share_of_token(model, path, shape, config) if routed else 1))
            dense, frozen = dense + multiplied, frozen + multiplied * (not p.requires_grad)
    heads, _, width = heads_of(config)
    windows = windows_of(config, layers, getattr(config, "attention_chunk_size", None))
    return {
        "dense_params": dense, "heads": heads, "head_dim": width, "layers": layers, "windows": windows,
        "frozen": frozen,
    }  # fmt: skip


def windows_of(config: Any, layers: int, chunk: int | None) -> tuple[int, int]:
    """(keys that a query attends to in a sliding window, or on average in a chunk of so many positions; layers that
    have it), for a decoder of so many layers; zeros where it has neither."""
    window = getattr(config, "sliding_window", None) or (chunk or 0) // 2
    kinds = list(getattr(config, "layer_types", None) or ())[:layers]  # where the number of layers alone was changed
    near = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    windowed = near if kinds else layers * bool(window)
    return window if windowed else 0, windowed


def experts_of_token(config: Any) -> int | None:
    """The number of experts that a token goes to; None without experts."""
    names = ("num_experts_per_tok", "top_k_experts", "moe_topk")  # the others are Gemma 4's and Aria's
    return next((k for name in names if isinstance(k := getattr(config, name, None), int)), None)


def share_of_token(root: nn.Module, path: str, shape: Sequence[int], config: Any) -> float:
    """The share of a matrix, at this path below a module, that multiplies each token: of experts, those that it goes
    to."""
    names = path.split(".")
    blocks = [root.get_submodule(".".join(names[:i])) for i in range(1, len(names))]
    each = [k for m in blocks for n in ("top_k", "num_experts_per_tok") if isinstance(k := getattr(m, n, None), int)]
    listed = [len(m) for m, name in zip(blocks, names) if name == "experts" and isinstance(m, nn.ModuleList)]
    experts = listed[-1] if listed else shape[0] if len(shape) > 2 else 0
    chosen = max(each, default=experts_of_token(config) or 1)
    return min(1.0, chosen / experts) if experts else 1.0


def beyond_training(config: Any, tokens: int) -> str:
    """What to know of documents of so many tokens, where the model was trained on shorter ones and its rotary positions
    are not scaled; empty elsewhere."""
    trained, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    if not trained or tokens <= trained or rope.get("rope_type", "default") != "default" or "rope_theta" not in rope:
        return ""
    yarn = {"rope_type": "yarn", "rope_theta": rope["rope_theta"], "factor": float(-(-tokens // trained)),
            "original_max_position_embeddings": trained}  # fmt: skip
    return (
        f"a document has {tokens:,} tokens, but the model was trained on {trained:,} at most and its RoPE is not "
        f"scaled: the loss begins high there. Before the model is loaded, write config.rope_parameters = {yarn}"
    )


def flos(
    seq_len: int, tokens: int, dense_params: int, heads: int, head_dim: int, layers: int,
    windows: tuple[int, int] = (0, 0), frozen: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Floating-point operations of one training step over `tokens` tokens in samples of `seq_len`, both conventions.

    A token's forward costs 2 N in the `dense_params` N (summed over the layers, with the head, without the embedding
    lookup), and a sample's 4 S^2 head_dim heads a layer in QK^T and PV.

    - paper: Megatron style, forward counted 4 times (with the recompute), full attention matrix:
      `8 N T + 16 S^2 head_dim heads layers` a sample (ALST paper, section 5.1).
    - model: forward counted 3 times, only the causal half of the attention: `6 N T + 6 S^2 head_dim heads layers`. Of
      layers with a window it counts the pairs in it, and `frozen` matrices have no gradients (2 N T less).
    """
    attention = float(seq_len) * tokens * head_dim * heads * layers  # S^2 a sample, times tokens / S samples
    dense = float(dense_params) * tokens
    window, windowed = windows
    pairs = (layers - windowed) * causal_pairs(seq_len) + windowed * causal_pairs(seq_len, window)
    computed = 12 * pairs * tokens / seq_len * head_dim * heads
    return {"paper": 8 * dense + 16 * attention, "model": 6 * dense - 2 * float(frozen) * tokens + computed}


def mfu(flops: float, device: Any) -> float | None:
    """FLOPs per second of the model on one GPU as a share of its peak; None where the peak is not known."""
    here = accelerator(device)
    name = None if here is None else gpu_named(here.get_device_name(device))
    return flops / PEAKS[name] if name else None


def put_liger(run: RunConfig, model: PreTrainedModel, gpu: bool) -> None:
    """Put Liger's norm, RoPE and SwiGLU kernels into a run's model, before `apply`, where `liger` says so: tiles then
    run them. (The paper had to leave SwiGLU out with tiled MLPs.) Liger's fused loss is not used, because its tiles
    grow with the sequence.

    With `auto` they are put in on a GPU, with the tiled loss (the paper's baseline has none of them), where they are
    installed and know the model.

    Raises:
        ValueError: they are asked for by name, and there is no GPU, or they are not installed or do not know the model.
    """
    wanted, kind = run.model.liger, model.config.model_type
    if wanted == "auto":
        wanted = gpu and bool(run.options.tile("loss")) and kind in liger_knows()
    elif wanted and not (gpu and kind in liger_knows()):
        raise ValueError(
            f"liger={wanted!r} needs a GPU and the package liger-kernel of version {LIGER} or later, which is not "
            f"installed or does not know the model_type {kind}; use liger='auto'"
        )
    if wanted:
        liger_kernels(model)


LIGER = "0.8.4"
"""The first version of Liger whose norms and RoPE count elements with 64 bits: with 32, a call of 2^31 of them would be
finite and wrong."""


def liger_knows() -> Collection[str]:
    """The types of models that Liger has kernels for; none where it is not installed, or older than `LIGER`."""
    found = next(iter(importlib.metadata.distributions(name="liger-kernel")), None)
    if found is None or Version(found.version) < Version(LIGER):
        return ()
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return MODEL_TYPE_TO_APPLY_LIGER_FN


def liger_kernels(model: PreTrainedModel) -> None:
    """Put all kernels that Liger has for this type of model into it, but those of the loss."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
