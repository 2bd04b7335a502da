"""What a step takes at any length, fitted to simulations of the real code (`simulate`), and kept: of public models in
fits.json, which comes with the library (papermill_runs/planner/public_fits.py writes it), of others in the user's
cache.

For a model, options, a number of ranks and a kind of device, the bytes that are alive at a moment of a step are linear
in the tokens of a rank, as long as the same tiles are whole. So a step is simulated at two lengths between two sizes of
a tile (or at whole chunks), and at no other length there. Without torch, unless something has to be simulated.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from alstlib.base.config import RunConfig, not_default
from alstlib.base.options import Options
from alstlib.hf.loading.configs import code_of, overridden, planned_config
from alstlib.planner.progress import watched

SIMULATOR = "alstlib.planner.measure.answers"
"""Named, as it imports torch and what the planner predicts."""
CACHE_VARIABLE = "ALST_CACHE"
"""Names another folder for what was simulated."""
FILE = Path(__file__).with_name("fits.json")
REFERENCE = Path(__file__).resolve().parents[2] / "papermill_runs/referee/reference_stack.py"
"""Simulates the stack of the `paper`."""
KERNEL = "#kernel"
"""Marks a moment within attention's backward."""
FORWARD = "#forward"
"""Marks a moment of the first forward, of a small model: an engine holds more of its weights then than in backward."""


def in_layer(place: str) -> bool:
    """Whether a module's path lies in a decoder layer."""
    return re.search(r"\.\d", place) is not None


def part_of(place: str) -> str:
    """Where in the model a module lies: `layer`, `mlp` (a layer's) or `outside`."""
    return "outside" if not in_layer(place) else "mlp" if re.search(r"\.\d+\.mlp", place) else "layer"


def element_bytes(run: RunConfig, device: str) -> int:
    """Bytes of a number in a weight and in an activation."""
    return 2 if run.bf16(device == "cuda") else 4


@dataclass(frozen=True)
class Moment:
    """What is alive where memory stops growing for a while."""

    place: str
    """The module, as the whole model names it."""
    kernel: bool
    """Whether it is in attention's backward, where a GPU's kernel has a workspace of its own."""
    line: Mapping[str, tuple[float, float]]
    """Bytes of each category without any tokens, and for each row."""
    when: str = ""
    """`forward`, in the first forward of a small model (`FORWARD`), or `after` backward; else it is in backward."""

    @property
    def part(self) -> str:
        """When it is, or where in the model: `attention` (its backward), or `part_of` the place."""
        return self.when or ("attention" if self.kernel else part_of(self.place))

    def at(self, tokens: float) -> dict[str, float]:
        return {name: max(0.0, base + each * tokens) for name, (base, each) in self.line.items()}


@dataclass(frozen=True)
class StepQuestion:
    """What is simulated: a run whose places and kept outputs are decided, and whose one rank of how many."""

    run: RunConfig
    ranks: int
    device: str
    capability: int = 9
    preset: str = "ours"
    """The stack that runs it: `ours` or that of the `paper`."""
    images: bool = False
    """Whether the step has images: then hidden states stay on the device (`hf.hidden_states.travels`)."""

    @property
    def text(self) -> str:
        """All that the answer depends on but the tokens; a model by its config, wherever that lies, and by its code."""
        model = self.run.model
        config = overridden(planned_config(model.name), model.config)
        fields = {name: value for name, value in not_default(self.run).items() if not name.startswith("model.")}
        own = {"dtype": model.dtype, "lora": model.lora, "code": code_of(model.name) if model.trust_remote_code else ""}
        asked = {
            "config": config,
            "model": own,
            "run": fields,
            "on": [self.ranks, self.device, self.capability, self.preset, *["images"] * self.images],
        }
        return json.dumps(asked, sort_keys=True, default=str)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "run": not_default(self.run)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> StepQuestion:
        return cls(**{**fields, "run": RunConfig.from_dict(fields["run"])})


@dataclass(frozen=True)
class Lines:
    """What a step takes within a range of tokens."""

    moments: Sequence[Moment]
    host: tuple[float, float]
    """Bytes that wait on the host, without any tokens and for each row."""

    def host_at(self, tokens: float) -> int:
        return round(self.host[0] + self.host[1] * tokens)


def lines_at(question: StepQuestion, tokens: int) -> Lines:
    """The lines that hold for steps with so many tokens on a rank.

    Raises:
        ValueError: the model or an option is refused by `apply`; the message is its own.
    """
    chunks = f", in chunks of {question.run.chunk:,} tokens" if question.run.chunk else ""
    found = _once(
        "span", question.text, f"simulating steps of {question.run.model.name}, sp={question.ranks}{chunks}",
        question.to_dict, lambda one: one["from"] <= tokens <= one["to"], tokens=tokens,
    )  # fmt: skip
    return Lines([Moment(*moment) for moment in found["moments"]], tuple(found["host"]))


def facts_of(name: str, overrides: Mapping[str, Any], trust_remote_code: bool, images: bool = False) -> dict[str, Any]:
    """The fields of a `model_shapes.Shape`, counted on the model itself; with `images`, on the one that reads them."""
    config = overridden(planned_config(name), overrides)
    code, read = code_of(name) if trust_remote_code else "", ["images"] * images
    text = json.dumps(["facts", config, code, *read], sort_keys=True, default=str)
    asked = {"name": name, "overrides": dict(overrides), "trust": trust_remote_code, "images": images}
    return _once("facts", text, f"reading the sizes of {name}", lambda: asked)


def tower_of(run: RunConfig, device: str, size: Sequence[int] | None) -> dict[str, Any]:
    """What a model's vision tower takes for images of this size (`measure.towers.tower`).

    Args:
        run: its model, whether it keeps checkpoints, and whether these go to the host; nothing else matters to a tower.

    Raises:
        ValueError: a model that cannot read images, or whose tower is not planned, or an adapter.
    """
    if run.model.lora is not None:
        raise ValueError("images of a model with an adapter (model.lora) are not planned")
    kept = bool(run.options.checkpoint)
    options = Options.plain(checkpoint=kept, offload=kept and bool(run.options.offload))
    question = StepQuestion(RunConfig(model=run.model, options=options), 1, device, images=True)
    text = json.dumps(["tower", question.text, size])
    said = f"simulating the vision tower of {run.model.name}"
    return _once("tower", text, said, lambda: {**question.to_dict(), "size": size})


def _once(
    what: str, text: str, said: str, asked: Callable[[], Mapping[str, Any]],
    holds: Callable[[dict[str, Any]], bool] = lambda one: True, **about: int
) -> dict[str, Any]:  # fmt: skip
    """The first known answer that holds; where there is none, that of the simulator.

    Args:
        said: what is shown meanwhile.
        asked: gives the question as the cache keeps it; called only where it is not answered.
        about: what else the simulator is told.
    """
    known = _known(text)
    if (found := next(filter(holds, known), None)) is None:
        question = asked()
        with watched(said):
            found = json.loads(json.dumps(_ask(what, {**question, **about})))  # as it is read again
        known.append(found)
        _keep(text, known, {what: question})
    return found


class NotSimulated(ValueError):
    """The answer is not known, and nothing may be simulated now."""


_UNTIL: ContextVar[tuple[float, list[str]]] = ContextVar("until", default=(math.inf, []))


@contextmanager
def known_only(after: float = 0.0) -> Iterator[list[str]]:
    """Simulate nothing in this block, or nothing `after` so many seconds: what starts a run does not wait for it, a
    rank has other work, and advice must not take long. Gives what was not simulated."""
    missed: list[str] = []
    token = _UNTIL.set((min(_UNTIL.get()[0], time.monotonic() + after), missed))
    try:
        yield missed
    finally:
        _UNTIL.reset(token)


def _ask(what: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate in this process, or beside it where ranks are joined already."""
    until, missed = _UNTIL.get()
    if time.monotonic() >= until:
        missed.append(what)
        raise NotSimulated("its steps are simulated, which `alst plan` does and a run does not wait for")
    import torch.distributed as dist

    if not dist.is_initialized():
        return dict(importlib.import_module(SIMULATOR).answer(what, asked))
    question = json.dumps([what, asked])
    done = subprocess.run([sys.executable, "-m", SIMULATOR], input=question, capture_output=True, text=True)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [""])[-1].removeprefix("ValueError: "))
    return dict(json.loads(done.stdout.splitlines()[-1]))


# What is known


@functools.cache
def _known(text: str) -> list[dict[str, Any]]:
    """What comes with the library, and what this process or an earlier one found; the caller adds to it."""
    return _with_kept(text, public().get(digest(text), {}).get("found", ()))


def _with_kept(text: str, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """These answers, and others that the user's cache has now."""
    kept = []
    with suppress(OSError, ValueError):
        kept = json.loads(_file(text).read_text())["found"]
    return [*found, *(one for one in kept if one not in found)]


@functools.cache
def public() -> dict[str, Any]:
    """What comes with the library, by `digest`: what was asked (`span` or `facts`), and what was `found`. Its entry
    VERSIONS says by what it was simulated."""
    return dict(json.loads(FILE.read_text()))


VERSIONS = "versions"


def versions() -> dict[str, str]:
    """The versions of the packages that a simulation runs."""
    return {name: metadata.version(name).partition("+")[0] for name in ("torch", "transformers")}


def other_versions() -> str:
    """A remark where what comes with the library was simulated by other versions than are here."""
    was, now = public().get(VERSIONS, {}), versions()
    told = (" and ".join(f"{name} {version}" for name, version in of.items()) for of in (was, now))
    return "" if was == now else "steps of public models were simulated with {}; {} are here.".format(*told)


def digest(text: str) -> str:
    """What a question is kept by."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _keep(text: str, known: Sequence[dict[str, Any]], asked: Mapping[str, Any]) -> None:
    """Write these answers, and those that another process wrote meanwhile."""
    with suppress(OSError):  # a cache that cannot be written is not worth a plan
        _folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_folder()) as made:  # a file in it has the usual mode
            (file := Path(made) / "made").write_text(
                json.dumps({"text": text, **asked, "found": _with_kept(text, known)})
            )
            os.replace(file, _file(text))


def _file(text: str) -> Path:
    adapters = metadata.distributions(name="peft") if '"lora": {' in text else ()
    return _folder() / f"{digest(''.join([sources(), *(one.version for one in adapters), text]))}.json"


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE_VARIABLE) or Path(home) / "alst")


@functools.cache
def sources() -> str:
    """What a simulation runs: the package's own code, and the versions of what it stands on."""
    own = sorted(Path(__file__).resolve().parents[1].rglob("*.py"))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in own if "runs" not in path.parts[-3:]))
    if REFERENCE.is_file():
        code.update(REFERENCE.read_bytes())
    return json.dumps([code.hexdigest(), versions()])
