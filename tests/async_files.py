"""A stand-in for DeepSpeed's operator for files (async_io), which is compiled where libaio is: the same calls, one
after the other and through the page cache. What calls it is DeepSpeed's own code."""

import contextlib
import mmap
import os
from types import SimpleNamespace
from unittest import mock

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

OPERATOR = type(AsyncIOBuilder())
"""The class for this device: the name itself is a function."""
PINNED = {}
"""The sizes of what is pinned, by its place in memory."""


class FileHandle:
    """The handle of `async_io`."""

    def __init__(self, **_):
        self.calls = 0

    def new_cpu_locked_tensor(self, numel, like):
        size = numel * like.element_size()
        made = torch.frombuffer(mmap.mmap(-1, max(1, size)), dtype=like.dtype, count=numel)  # as no other tensor has it
        PINNED[made.data_ptr()] = size
        return made

    def free_cpu_locked_tensor(self, tensor):
        PINNED.pop(tensor.data_ptr(), None)

    def is_pinned(self, tensor):
        return any(0 <= tensor.data_ptr() - start < size for start, size in PINNED.items())

    def async_pwrite(self, tensor, path, offset):
        assert (offset, tensor.nbytes % 1024) == (0, 0)  # what direct access wants
        self.calls += 1
        if tensor.data_ptr() % 512 == 0:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:  # in place: it may be mapped
                file.write(_bytes(tensor))
        return 0

    def async_pread(self, tensor, path, offset):
        assert (offset, tensor.nbytes % 1024) == (0, 0)
        self.calls += 1
        if tensor.data_ptr() % 512 == 0:  # else the disk refuses, and the operator counts the call as done
            with open(path, "rb") as file:
                assert file.readinto(_bytes(tensor)) == tensor.nbytes
        return 0

    def wait(self):
        done, self.calls = self.calls, 0
        return done


def _bytes(tensor):
    return memoryview(tensor.detach().view(torch.uint8).numpy())


@contextlib.contextmanager
def async_files(compiled=False):
    """DeepSpeed writes its files with this stand-in, unless the operator itself is asked for."""
    if compiled:
        yield
        return
    made = SimpleNamespace(aio_handle=FileHandle)
    with (
        mock.patch.object(OPERATOR, "load", return_value=made),
        mock.patch.object(OPERATOR, "is_compatible", return_value=True),
    ):
        yield
