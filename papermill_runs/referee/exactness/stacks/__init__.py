"""One file for each stack, with a class `Stack`. It has three attributes:

- `sources`: the pages of its documentation that the file follows;
- `requires`: the packages whose versions belong to each verdict;
- `note`: what stands in for something that a CPU does not have, or what a reader must know; may be empty.

A stack with a loop of its own has these methods. Batches are whole samples of [1, S] tokens, the same on every rank.

- `prepare(model, ranks, case)`;
- `step(batches)` runs forward and backward of one optimizer step and returns the loss that it reports;
- `gradients()` returns each whole gradient as the optimizer gets it, by the names of `model.named_parameters()`;
- `update()` is the optimizer's step, and returns the norm of the gradients if the stack reports one.

A stack under a Trainer has `trainer(ranks, case)` in their place. It returns a `training.UnderTrainer`.

Nothing but the standard library is imported at the top of a file, so that the table can list a stack that is not
installed. A stack may also have `environment()`, variables that its processes need (`REFEREE_PATH`: a folder of
packages, which come before the environment's), and `ranks`, where its number is not 2. A file of requirements with the
name of the stack's pins what it `requires`, but torch, which is the environment's. So is transformers, unless the file
pins it.
"""

import importlib
from pathlib import Path
from typing import Any


def known() -> list[str]:
    """The names of all stacks: those of the files here, with - for _."""
    files = Path(__file__).parent.glob("[a-z]*.py")
    return sorted(path.stem.replace("_", "-") for path in files if not path.stem.startswith("plain"))


def load(name: str) -> Any:
    """The stack of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in (*known(), "plain", "plain-trainer"):
        raise ValueError(f"there is no stack '{name}': {', '.join(known())}")
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}").Stack()
