"""What the planner knows of a model: its sizes, counted on the model itself (`measure.answers.count`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from alstlib.base.config import Model, RunConfig
from alstlib.base.options import Options
from alstlib.base.sizing import causal_pairs
from alstlib.linear.ways import StateLayer
from alstlib.planner.fits import facts_of, tower_of
from alstlib.planner.state_ways import forward_flops

NOT_PLANNED = (
    "modules_to_save", "target_parameters", "trainable_token_indices", "rank_pattern", "layers_to_transform",
    "exclude_modules", "use_dora", "bias", "lora_bias", "layer_replication",
)  # fmt: skip
"""Fields of peft's LoraConfig that change how many parameters are trained, or what their training takes."""


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """The layers of a model that carry a state along the sequence. Such a layer needs the same few bytes from the ranks
    before, however long the sequence is: its state, what it multiplies the state by, and the tokens before its
    convolution."""

    layers: int
    """How many there are."""
    tail: int
    """Numbers of the tokens that a layer's convolutions need of the rank before."""
    layer: StateLayer | None
    """One of them; None for a convolution alone, and for a recurrence without heads (Mamba), whose time is not
    known."""

    @property
    def flops(self) -> float:
        """FLOPs of the recurrence of one layer in one forward, for each token."""
        return self.layer.heads * forward_flops(self.layer) if self.layer else 0.0


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images of one size, as many in each sample."""

    count: int
    """How many a sample has."""
    asked: tuple[int, int] | None
    """Height and width that were asked for, in pixels; None: the tower has one size."""
    size: tuple[int, int]
    """Height and width that the tower takes, in pixels."""
    each: int
    """Tokens that one takes in the sequence: a placeholder for each feature."""
    products: float
    """FLOPs of a forward of the tower over one, in matrix products."""
    attention: float
    """FLOPs of a forward of the tower over one, in attention."""

    @property
    def tokens(self) -> int:
        """Tokens that all of a sample take in the sequence."""
        return self.count * self.each

    def of_rank(self, ranks: int, batch: int = 1) -> int:
        """Images of the rank that has the most (`data.images.deal`)."""
        return -(-self.count * batch // ranks)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a decoder. Parameters are counted in elements."""

    name: str
    family: str
    """The `model_type` that transformers gives it."""
    vocab: int
    width: int
    mlp: int
    """The intermediate width of a dense layer; 0 where its config names none."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    """The width of a query and of a key."""
    value_dim: int
    window: int
    """Keys that a query of a layer with a sliding window attends to, or, on average, one in a chunk of positions; 0: no
    layer has either."""
    windowed: int
    """Layers that have it."""
    softcap: bool
    """Whether attention caps its scores."""
    attending: int
    """The number of layers with attention."""
    parameters: int
    layer_parameters: int
    """Parameters of the largest decoder layer."""
    largest_tensor: int
    mixing: int
    """Parameters of the matrices of all layers that mix tokens, or are before and after what does."""
    mlp_of_token: int
    """Parameters of all MLPs and routers that multiply one token: of experts, those that it is sent to."""
    linear: Mapping[str, int]
    """Widths of what goes into linear modules and comes out of them, all together, by the modules' names."""
    recurrence: Recurrence | None
    """What layers with a state have; None: the model has none of them."""
    not_by_blocks: str = ""
    """Why it cannot run block by block; empty where it can."""
    unknown_experts: str = ""
    """What of it needs `experts_by_token` to run in parts; empty where nothing does."""
    images: Images | None = None
    """The images of each sample; None: text alone."""

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of an untied head."""
        return self.vocab * self.width

    @property
    def dense_parameters(self) -> int:
        """What multiplies each token: the layers' matrices and the head (as `loading.models.flos` counts)."""
        return self.mixing + self.mlp_of_token + self.embedding

    @property
    def linear_parameters(self) -> int:
        """Parameters of the layers' linear modules.

        Raises:
            ValueError: a model with experts, which are no linear modules.
        """
        found, tables = self.mixing + self.mlp_of_token, (1, 2)
        if not any(abs(self.parameters - found - n * self.embedding) < 0.01 * self.parameters for n in tables):
            raise ValueError(f"model.bits=4 is planned of models whose layers are linear modules, not of {self.name!r}")
        return found

    def adapter_parameters(self, lora: Mapping[str, Any]) -> int:
        """The number of parameters of LoRA adapters with these fields of peft's LoraConfig."""
        return int(lora.get("r", 8)) * sum(self.linear[name] for name in self.adapted(lora))

    def adapted(self, lora: Mapping[str, Any]) -> set[str]:
        """Names of the linear modules that have LoRA adapters: all of the layers where the fields name none.

        Raises:
            ValueError: fields by which other modules are trained, or modules in part.
        """
        known, targets = ", ".join(self.linear), lora.get("target_modules") or "all-linear"
        names = [*self.linear] if targets == "all-linear" else [targets] if isinstance(targets, str) else targets
        if not isinstance(names, list | tuple | set) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"model.lora: target_modules={targets!r} must be names of linear modules, of {known}")
        named = {*names}
        # "none" is peft's default of `bias`
        fields = [name for name in NOT_PLANNED if lora.get(name) and lora[name] != "none"]
        if other := fields + sorted(named - {*self.linear}):
            raise ValueError(f"model.lora with {other[0]!r} is not planned: give r and target_modules of {known}")
        return named

    def pairs(self, seq_len: int, share: float = 1.0) -> float:
        """Pairs of a query and a key that attention computes in a sample, all layers: this share of a causal half, or
        what lies in the window."""
        inside = self.windowed * causal_pairs(seq_len, self.window)
        return share * (self.attending - self.windowed) * causal_pairs(seq_len) + inside


def read_shape(
    name: str, overrides: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False, images: int = 0,
    image_size: tuple[int, int] | None = None,
) -> Shape:  # fmt: skip
    """The shape of a built-in or public model, of a folder or config.json here, or of a model in the hub's cache.

    Args:
        images: the number of images of each sample.
        image_size: their height and width in pixels, as the model's processor makes them; None where the tower has one.

    Raises:
        ValueError: an unknown model (with the nearest known one), one that `apply` refuses, or images that it cannot
            read or that are not planned.
    """
    fields = facts_of(name, overrides or {}, trust_remote_code, bool(images))
    of_images = None
    if images:
        model = Model(name=name, config=dict(overrides or {}), trust_remote_code=trust_remote_code, dtype="bf16")
        one = tower_of(RunConfig(model=model, options=Options(offload=True)), "cuda", image_size)
        of_images = Images(
            count=images, asked=image_size, size=tuple(one["size"]), each=one["tokens"], products=one["products"],
            attention=one["attention"],
        )  # fmt: skip
    return SHAPES.validate_python({**fields, "name": name, "images": of_images})


SHAPES = TypeAdapter(Shape)
"""Makes a shape of what JSON has."""
