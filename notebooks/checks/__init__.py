"""Exercises that ask for code: hints, and checks that take the function that a reader wrote.

`lesson_NN.py` has the exercises of lesson NN in `EXERCISES`, by their number. In a lesson, the answer cell defines a
function whose body is `raise NotImplementedError`, and the cell after it is `judge("03.1", my_function)`. Where the
answer is a value, it is None at first, and the cell after it is `judge("03.2", lambda: my_value)`: the check calls the
function to get it. A reader who is stuck calls `hint("03.1")`, then `hint("03.1", 2)`, and so on.
"""

import html
import inspect
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from IPython.display import display
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Exercise:
    """One function that a reader writes, or one that returns the value that a reader set.

    `check(function)` calls it on inputs that the lesson does not show (odd sizes among them), raises AssertionError
    with a sentence that says what is wrong and on which input, and returns a sentence about what was right.
    `hints` go from a pointer to nearly the answer. `mistakes` are wrong functions that the check must refuse: the
    usual errors; `tests/test_checks.py` tries each.
    """

    check: Callable[[Callable[..., Any]], str]
    hints: tuple[str, ...]
    mistakes: tuple[Callable[..., Any], ...]


BOX = '<div style="border-left: 4px solid #d55e00; background: rgba(213, 94, 0, 0.12); padding: 0.5em 1em">{}</div>'
"""The colours let those of a light and of a dark theme through."""


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an answer makes, in elements: what an exercise forbids to exist as a whole."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def find(name: str) -> Exercise:
    """The exercise of a name such as "03.1": the lesson, and the number of the exercise in it."""
    lesson, number = name.split(".")
    exercises: dict[int, Exercise] = import_module(f"checks.lesson_{lesson}").EXERCISES
    return exercises[int(number)]


def judge(name: str, function: Callable[..., Any]) -> None:
    """Print whether the function is right, or show what is wrong about it in a box: as after an exercise that is not
    answered, the cells below run. With ALST_STRICT=1 in the environment, as where lessons are checked, AssertionError
    says it."""
    exercise = find(name)
    value = function.__name__ == "<lambda>" and not inspect.signature(function).parameters
    try:
        if value and function() is None:
            raise NotImplementedError
        print(f"right: {exercise.check(function)}")
    except NotImplementedError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not value and frame.f_code is not function.__code__:
            raise  # the answer's own, such as of an operator that PyTorch does not have
        what = "set the value" if value else f"write {function.__name__}"
        print(f'not answered yet: {what} above, or ask for help with hint("{name}")')
    except AssertionError as error:
        if os.environ.get("ALST_STRICT") == "1":
            raise AssertionError(error) from None  # without the lines of the check
        lines = (f"not right yet: {error}", f'ask for help with hint("{name}")')
        text = "<br>".join(map(html.escape, lines))
        display({"text/plain": "\n".join(lines), "text/html": BOX.format(text)}, raw=True)


def hint(name: str, level: int = 1) -> None:
    """Print one of the exercise's hints; level 1 tells least."""
    hints = find(name).hints
    if not 1 <= level <= len(hints):
        raise ValueError(f"level={level}: exercise {name} has hints 1 to {len(hints)}")
    more = f'; hint("{name}", {level + 1}) tells more' if level < len(hints) else ""
    print(f"hint {level} of {len(hints)}: {hints[level - 1]}{more}")
