"""Why a backward with hidden states on the host runs in one thread: what ZeRO-3 does with gradients that come later
than its hook looks for them. Whole steps under engines, in one thread, are cases of tests/test_matrix.py."""

import contextlib
import time
from unittest import mock

import matrix

ZERO3 = matrix.Case("llama", "1x1", way="host", engine="zero3", device="late")


def of_zero3(rank, world, single):
    """What a step of ZeRO-3 gives, or its error, where the device's thread takes its time with each gradient."""
    engine_of = matrix.engine_of

    def slow(*args):
        engine = engine_of(*args)
        for p in engine.parameters():
            p.register_hook(lambda g: time.sleep(0.002))
        return engine

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(matrix, "engine_of", slow))
        if not single:
            stack.enter_context(mock.patch("alstlib.hf.hidden_states.backward_in_this_thread", return_value=None))
            stack.enter_context(mock.patch("alstlib.streaming.chunked.check_thread"))
        try:
            return matrix.run(rank, world, ZERO3)
        except (RuntimeError, AssertionError) as e:
            return f"{type(e).__name__}: {e}"


def test_zero3_needs_one_thread(late1):
    """In two threads its hook finds no gradient, puts zeros in its place, and lets the weight go before it arrives."""
    matrix.check(late1(of_zero3, True), ZERO3)
    (result,) = late1(of_zero3, False)
    assert isinstance(result, str) or result["gradient"] > 1e-3, result
