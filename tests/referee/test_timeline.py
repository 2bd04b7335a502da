"""What the timeline says of a trace whose lanes are known."""

import pytest
import yaml
from cases import lines_of
from timeline import COLUMNS, as_page, summary


def event(cat, name, begin, end, tid=7, nbytes=0):
    about = {"cat": cat, "name": name, "tid": tid, "args": {"bytes": nbytes}}
    return {"ph": "X", "ts": begin * 1e6, "dur": (end - begin) * 1e6, **about}


EVENTS = """
kernel       | gemm                           | 0 | 4
kernel       | softmax                        | 3 | 5
kernel       | attention                      | 8 | 10
gpu_memcpy   | Memcpy DtoH (Device -> Pinned) | 1 | 3  | 13 | 400
gpu_memcpy   | Memcpy HtoD (Pinned -> Device) | 4 | 7  | 14 | 300
gpu_memcpy   | Memcpy DtoD (Device -> Device) | 0 | 10 | 7  | 1
cuda_runtime | cudaLaunchKernel               | 5 | 8
"""
"""The softmax is on another stream than the other kernels."""
TRACE = [event(*map(yaml.safe_load, line)) for line in lines_of(EVENTS, "|")]
TRACE.append({"ph": "M", "cat": "kernel", "name": "thread_name"})


def test_copies_beside_kernels_and_the_times_without_a_kernel():
    found = summary(TRACE)
    page = as_page(found, cuda=True)
    assert found | {
        "seconds": 10, "kernel_seconds": 7, "waiting_for_copies_seconds": 2, "idle_seconds": 1,
        "out": {"seconds": 2, "beside_kernels": 2, "bytes": 400, "copies": 1, "streams": 1},
        "back": {"seconds": 3, "beside_kernels": 1, "bytes": 300, "copies": 1, "streams": 1},
        "share_of_copies_beside_kernels": pytest.approx(3 / 5), "share_waiting_for_copies": pytest.approx(0.2),
        "gaps": [{"at": 5, "seconds": 3, "copying": 2, "before": "attention"}],
    } == found  # fmt: skip
    for lane, tenths in (("kernels", "@@@@@   @@"), ("out", " @@       ")):
        assert found["bars"][lane] == "".join(one * (COLUMNS // 10) for one in tenths)
    for line in (
        "| no kernel, a copy runs | 2.0 s | 20.0% |", "| out | 2.0 s | 100.0% | 400 B | 200 B | 1 |",
        "| 3.0 s | 5.0 s | 2.0 s | `attention` |",
    ):  # fmt: skip
        assert line in page


def test_a_trace_without_copies_says_so_and_one_without_kernels_is_refused():
    found = summary([event("cpu_op", "aten::mm", 0, 1), event("cpu_op", "aten::add", 2, 3)])
    assert found["share_of_copies_beside_kernels"] is None
    assert any("no copies on a side stream" in line for line in as_page(found, cuda=False))
    with pytest.raises(RuntimeError, match="no kernel"):
        summary(TRACE[3:])
