"""A step on the device on a CPU in one thread and in two; other steps are cases of tests/test_matrix.py."""

from __future__ import annotations

import contextlib
import time
from typing import Any
from unittest import mock

import matrix

ALONE = matrix.Case("llama", "1x1", way="host", device="late")
ZERO3 = matrix.Case("llama", "1x1", way="host", engine="zero3", device="late")
ONE_THREAD, CHECK = "hf.hidden_states.backward_in_this_thread", "streaming.chunked.check_thread"


def step(rank: int, world: int, case: matrix.Case, *without: str) -> dict[str, Any] | str:
    """What it gives, or its error, where the device's thread takes its time with each gradient; some functions do
    nothing."""
    engine_of = matrix.engine_of

    def slow(*args: Any) -> Any:
        engine = engine_of(*args)
        for p in engine.parameters():
            p.register_hook(lambda g: time.sleep(0.002))
        return engine

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(matrix, "engine_of", slow))
        for name in without:
            stack.enter_context(mock.patch(f"alstlib.{name}", return_value=None))
        try:
            return matrix.run(rank, world, case)
        except (RuntimeError, AssertionError) as e:
            return f"{type(e).__name__}: {e}"


def test_two_threads_are_refused(late1: Any) -> None:
    (refused,) = late1(step, ALONE, ONE_THREAD)
    assert "another thread" in refused


def test_zero3_needs_one_thread(late1: Any) -> None:
    """In two threads its hook finds no gradient, puts zeros in its place, and lets the weight go before it arrives."""
    matrix.check(late1(step, ZERO3), ZERO3)
    (result,) = late1(step, ZERO3, ONE_THREAD, CHECK)
    assert isinstance(result, str) or result["gradient"] > 1e-3, result
