"""Threads on the device on a CPU. Backward of hidden states on the host runs in the thread that called it, and
gradients of weights arrive in that of the device: only in one thread is one there when an engine's hook looks for it.
Whole steps under every engine, and the order of their collectives, are cases of tests/test_matrix.py."""

import contextlib
import time
from unittest import mock

import matrix

PLAIN, ZERO3 = (
    matrix.Case("llama", "1x1", way="host", engine=engine, device="late") for engine in ("average", "zero3")
)
TWO_THREADS = ("alstlib.hf.hidden_states.backward_in_this_thread", None)
UNCHECKED = ("alstlib.streaming.chunked.check_thread", None)
"""What a mistake leaves out, and what it gives instead."""


def step(rank, world, case, *mistakes):
    """What a step gives, or its error, where the device's thread takes its time with each gradient."""
    engine_of = matrix.engine_of

    def slow(*args):
        engine = engine_of(*args)
        for p in engine.parameters():
            p.register_hook(lambda g: time.sleep(0.002))
        return engine

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(matrix, "engine_of", slow))
        for name, value in mistakes:
            stack.enter_context(mock.patch(name, return_value=value))
        try:
            return matrix.run(rank, world, case)
        except (RuntimeError, AssertionError) as e:
            return f"{type(e).__name__}: {e}"


def test_zero3_needs_one_thread(late1):
    """In two threads its hook finds no gradient, puts zeros in its place, and lets the weight go before it arrives."""
    matrix.check(late1(step, ZERO3), ZERO3)
    (result,) = late1(step, ZERO3, TWO_THREADS, UNCHECKED)
    assert isinstance(result, str) or result["gradient"] > 1e-3, result


def test_two_threads_are_refused(late1):
    (said,) = late1(step, PLAIN, TWO_THREADS)
    assert "backward was called in another thread than forward" in said
