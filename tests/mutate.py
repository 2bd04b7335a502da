"""Mistakes made on purpose: a function has other source for as long as a test runs."""

import contextlib
import inspect
from types import CodeType


@contextlib.contextmanager
def mutated(function, *changes):
    """Inside, the function or method, without what decorates it, runs `changed` code. Only its code is exchanged: who
    has imported the function calls the changed one too."""
    function = inspect.unwrap(function)
    original = function.__code__
    function.__code__ = changed(function, *changes)
    try:
        yield
    finally:
        function.__code__ = original


def changed(function, *changes):
    """The code of a function in whose source each first piece of `changes` is replaced by the second.

    Raises:
        ValueError: the source does not have a piece exactly once, so that the change must follow the source.
    """
    function = inspect.unwrap(function)
    source = body = inspect.getsource(function)
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{function.__qualname__} has {source.count(old)} times {old!r}: change the mutation")
        source = source.replace(old, new)
    module = inspect.getmodule(function)
    codes = [compile(inspect.getsource(module).replace(body, source), f"<changed {module.__name__}>", "exec")]
    for code in codes:  # the module's, and then all that lie inside
        if code.co_qualname == function.__qualname__:
            return code
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    raise AssertionError(function.__qualname__)
