"""`Handle`, which `apply` returns, holds everything that is attached to one model, and takes it back."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from alstlib.base.mesh import SPContext
from alstlib.base.options import Options, TiledPart
from alstlib.base.recompute import entered
from alstlib.data.images import ImageLayout
from alstlib.hf.memory_plan import MemoryPlan
from alstlib.hf.pass_state import PassState, state_now
from alstlib.hf.support import Facts
from alstlib.linear.ways import StateLayer
from alstlib.offload.courier import Travel
from alstlib.offload.disk_store import DiskStore
from alstlib.offload.host_store import HostStore, Mode
from alstlib.streaming.pages import PageChooser
from alstlib.tiled.loss import TiledHead
from alstlib.ulysses.attention import UlyssesAttention

_MODES: dict[bool | str, Mode] = {False: "none", "sync": "sync", True: "async"}


class Handle:
    """What `apply` returns: the attachment to one model. `detach()`, or leaving `with apply(...):`, takes it back.

    Attributes for users: `model`, `ctx`, `options`, `notes`, `plan` (what the last forward kept, and where),
    `images` (how the model takes images, for `SPDataLoader` and `shard_batch`), `wire_bytes`.
    """

    def __init__(self, model: PreTrainedModel, ctx: SPContext, options: Options, facts: Facts) -> None:
        self.model, self.ctx, self.options, self.facts = model, ctx, options, facts
        self.attention = UlyssesAttention(ctx, options.attention)
        mode, budget, disk = _MODES[options.offload], options.host_memory, options.disk
        self.store = HostStore(mode, budget=budget) if disk is None else DiskStore(mode, disk, ctx, budget=budget)
        """Where checkpoints, and what else lies on the host, are kept."""
        self.chunk = options.chunk_for(model.config.get_text_config().hidden_size)
        """Tokens of one chunk of this rank's slice; None: layers run whole."""
        self.notes: list[str] = [f"chunk='auto' took {self.chunk:,} tokens"] if options.chunk == "auto" else []
        """What was not tiled or not kept, and why: one sentence for each."""
        self.plan = MemoryPlan(ctx, options, facts, self.store, self.notes)
        """What the last forward kept for backward, and where."""
        self.edits = Edits()
        self.head: TiledHead | None = None
        """The model's tiled head; None where the loss is left untiled."""
        self.recurrences: dict[StateLayer, None] = {}
        """The sizes of layers with a state and heads that have run, in order."""
        self.page_chooser: Callable[[], PageChooser | None] = lambda: None
        """Makes what selects the pages of keys that the chunks of one call of a layer see; None: all are seen."""
        self.images: ImageLayout | None = None
        """How the model takes images; None: it reads none."""
        self.plain = False
        """Whether the model runs as its own, in generate() or after detach()."""
        self.generates = ctx.sp == 1
        """Whether generate() works: the ranks of a group hold whole prompts, and each generates by itself."""
        self.ends = contextlib.ExitStack()
        """What `detach` calls, besides taking the edits back."""
        if isinstance(self.store, DiskStore):
            self.ends.callback(self.store.close)

    def detach(self) -> PreTrainedModel:
        """Restore the model exactly as it was before `apply`, and return it. Take it out of engines first. A second
        call does nothing."""
        self.plain = True
        self.edits.close()
        self.ends.close()
        self.store.trim()
        return self.model

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank's attention has sent to other ranks since `apply`."""
        return self.attention.exchange.bytes_sent

    def tile(self, part: TiledPart) -> int | None:
        """Tokens of one tile of this part; None: they are chosen by the tensors' sizes."""
        asked = self.options.tile(part)
        return None if asked is True else int(asked)

    def set_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Give this one module another `forward`, until detach, for when the model does not run as its own;
        torch.compile leaves it as it is."""
        original = module.forward

        @torch.compiler.disable
        @functools.wraps(original, updated=())  # others ask what it takes; marks of torch.compile are not for us
        def either(*args: Any, **kwargs: Any) -> Any:
            return (original if self.plain else forward)(*args, **kwargs)

        self.edits.set(module, "forward", either)

    def swap(self, old: nn.Module, new: nn.Module) -> None:
        """Put `new` where `old` is, everywhere in the model, until detach; torch.compile leaves it as it is."""
        self.set_forward(new, new.forward)
        if isinstance(new, TiledHead):
            self.head = new
        for parent in list(self.model.modules()):
            for name, child in list(parent._modules.items()):
                if child is old:
                    self.edits.swap(parent, name, new)

    # ----- what runs

    @contextlib.contextmanager
    def as_its_own(self) -> Iterator[None]:
        """Inside, the model runs as its own."""
        before, self.plain = self.plain, True
        try:
            yield
        finally:
            self.plain = before

    @property
    def state(self) -> PassState | None:
        """The pass of an attached model that runs now; None between calls, and where the model runs as its own."""
        return None if self.plain else state_now()

    @property
    def running(self) -> PassState:
        """The pass that runs now, where a part of the model cannot run without it.

        Raises:
            ValueError: nothing of an attached model runs.
        """
        if (state := state_now()) is None:
            raise ValueError(
                "call the model that apply() was given, not a part of it: only the model gets documents and labels"
            )
        return state

    def entered(self, state: PassState) -> contextlib.AbstractContextManager[None]:
        """Run what is inside, a layer's pass, as this pass.

        Raises:
            ValueError: the model has been detached since.
        """
        if self.plain:
            name = type(self.model).__name__
            raise ValueError(f"backward of a graph that {name} made before detach(): call backward before detach()")
        return entered(state)

    def travel(self, x: bool = True) -> Travel | None:
        """How hidden states of the call that runs now visit the device; None where they lie there."""
        state = self.state
        return Travel(self.store, state.inputs.device, x) if state is not None and state.travels else None


# ----- changes to modules


ABSENT = object()
"""Stands for the value of a key that a dictionary did not have."""


class Edits:
    """Changes to modules, until `close`. What somebody else has put over a change meanwhile stays.

    A deep copy shares functions with its original: a `forward` or a hook that was put on a module would go on working
    for the original inside the copy. So a changed module is copied as it was before.
    """

    def __init__(self) -> None:
        self._made: list[tuple[dict[Any, Any], Any, Any, Any]] = []
        """Dictionaries of modules that were changed, with the key, what it has now, and what it had before."""

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Give this instance another attribute, which is neither a parameter nor a child."""
        self._put(module, module.__dict__, name, value)

    def swap(self, parent: nn.Module, name: str, new: nn.Module) -> None:
        """Put another child in a child's place."""
        self._put(parent, parent._modules, name, new)

    def hook(self, module: nn.Module, made: RemovableHandle) -> None:
        """Keep this forward hook or forward pre-hook of the module."""
        for there in (made.hooks_dict_ref, *made.extra_dict_ref):
            hooks = there()
            if made.id in hooks:
                self._put(module, hooks, made.id, hooks.pop(made.id))

    def close(self) -> None:
        """Take everything back."""
        for where, key, value, before in reversed(self._made):
            if where.get(key) is not value:
                continue
            if before is ABSENT:
                del where[key]
            else:
                where[key] = before
        self._made.clear()

    def _put(self, module: nn.Module, where: dict[Any, Any], key: Any, value: Any) -> None:
        if "__deepcopy__" not in module.__dict__:
            own = functools.partial(self._copy, module)
            module.__dict__["__deepcopy__"] = own
            self._made.append((module.__dict__, "__deepcopy__", own, ABSENT))
        self._made.append((where, key, value, where.get(key, ABSENT)))
        where[key] = value

    def _copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """A deep copy of the module as it was: meanwhile everything is taken back."""
        made, attached = [*self._made], [(where, dict(where)) for where, *_ in self._made]
        self.close()
        try:
            return copy.deepcopy(module, memo)
        finally:
            self._made = made
            for where, entries in attached:
                where.clear()
                where.update(entries)
