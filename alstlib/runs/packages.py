"""Packages that the fields of a run ask for, and that a tokenizer has the template that its data ask for: looked for
before ranks start. No package is imported, for that would take seconds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from alstlib.config import RunConfig
from alstlib.hf.configs import find_config
from alstlib.hf.public_models import SHAPES
from alstlib.options import check_names
from alstlib.planner import devices

TRACKERS = {
    "azure_ml": "azureml", "clearml": "clearml", "codecarbon": "codecarbon", "comet_ml": "comet_ml",
    "dagshub": "dagshub", "dvclive": "dvclive", "flyte": "flytekit", "kubeflow": "transformers", "mlflow": "mlflow",
    "neptune": "neptune", "swanlab": "swanlab", "tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb",
}  # fmt: skip
"""What the Trainer's `report_to` may name, and the module that each needs."""
OPTIMIZERS = (
    (r"adamw_torch_[48]bit", "torchao"), (r"galore_", "galore_torch"), (r"apollo_", "apollo_torch"),
    (r"(ada)?lomo", "lomo_optim"), (r"grokadamw", "grokadamw"), (r"schedule_free_", "schedulefree"),
    (r"stable_adamw", "optimi"), (r"\w*(_bnb|_8bit|_32bit)|ademamix", "bitsandbytes"),
)  # fmt: skip
"""Names of the Trainer's `optim`, and the module that each needs: the first that matches."""
KERNELS = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface",
           "flash_attention_4": "flash_attn.cute"}  # fmt: skip
"""What `attention` may name that is a package's."""
PIP = {"azureml": "azureml-core", "optimi": "torch-optimi", "flash_attn_interface": "flash-attn-3",
       "flash_attn.cute": "flash-attn-4"}  # fmt: skip
"""Packages that are not named as their module is."""


def check(run: RunConfig, fine_tuning: bool) -> None:
    """Refuse a run of this library's workers that needs a package which is not installed, or a chat template that the
    tokenizer has not.

    Raises:
        ValueError: it names the field, the package and the command that installs it.
    """
    for field, module in _needed(run, fine_tuning):
        if not _installed(module):
            package = PIP.get(module, module.replace("_", "-"))
            raise ValueError(
                f"{field} needs the package {package}, which is not installed; to install it: "
                f"{sys.executable} -m pip install {package}"
            )
    name = tokenizer_name(run)
    for data in (run.data.name, run.data.eval):
        if isinstance(data, str) and Path(data).expanduser().exists() and _begins_with_a_chat(data):
            _check_template(data, name, run.model.trust_remote_code)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # what it is a part of is not there
        return False


def _needed(run: RunConfig, fine_tuning: bool) -> Iterator[tuple[str, str]]:
    """Fields of the run, and the module that each needs."""
    trainer, gpus = run.optim.trainer, devices.device_count()
    trackers = trainer.get("report_to") or []
    for name in [trackers] if isinstance(trackers, str) else trackers:
        if name not in ("none", "all"):
            check_names([name], TRACKERS, "tracker in optim.trainer={'report_to': ...}:")
            yield f"optim.trainer={{'report_to': {trackers!r}}}", TRACKERS[name]
    optimizer = str(trainer.get("optim", ""))
    if module := next((module for names, module in OPTIMIZERS if re.match(names, optimizer)), None):
        yield f"optim.trainer={{'optim': {optimizer!r}}}", module
    if gpus and run.options.attention in KERNELS:
        yield f"options.attention={run.options.attention!r}", KERNELS[run.options.attention]
    if gpus and run.model.liger not in ("auto", False):
        yield f"model.liger={run.model.liger!r}", "liger_kernel"
    if not fine_tuning or (gpus and not run.engine.fsdp):
        yield f"engine.zero_stage={run.engine.zero_stage}", "deepspeed"
    with contextlib.suppress(ValueError):  # a model that is not there is refused elsewhere
        if (find_config(run.model.name).get("quantization_config") or {}).get("quant_method") == "bitsandbytes":
            yield f"model={run.model.name!r}, whose weights are in 4 or 8 bits,", "bitsandbytes"


def tokenizer_name(run: RunConfig) -> str:
    """The tokenizer of a run: the model's own, one that is named, or 'auto' for one that is trained on the data."""
    return run.model.name if run.data.tokenizer == "auto" and run.model.name not in SHAPES else run.data.tokenizer


@functools.cache
def _begins_with_a_chat(data: str) -> bool:
    """Whether the first row of a local file or folder can only be read by a chat template. What cannot be read at all
    is refused by whoever reads it, with the reason."""
    from alstlib.data.corpus import load_corpus, local_files
    from alstlib.data.formats import read_row

    if local_files(Path(data).expanduser())[0] == "text":
        return False
    try:
        first = load_corpus(data)[0]
    except Exception:  # every format's reader raises its own kinds
        return False
    return read_row(first, chats=False).messages is not None


@functools.cache
def _check_template(data: str, tokenizer: str, trust: bool) -> None:
    from alstlib.data.corpus import get_tokenizer

    trained = tokenizer in ("auto", "stdlib-bpe")
    if trained or not get_tokenizer(tokenizer, trust=trust).chat_template:
        which = "a tokenizer that is trained here" if trained else f"the tokenizer of '{tokenizer}'"
        raise ValueError(
            f"'{data}' holds chats, but {which} has no chat template: name a chat model in `model.name`, or its "
            "tokenizer in `data.tokenizer`"
        )
