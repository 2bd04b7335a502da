"""What the timeline says of a trace whose lanes are known."""

import pytest
from timeline import COLUMNS, as_page, summary


def event(cat, name, begin, end, tid=7, **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": begin * 1e6,
        "dur": (end - begin) * 1e6,
        "tid": tid,
        "args": args,
    }


TRACE = [
    event("kernel", "gemm", 0, 4),
    event("kernel", "softmax", 3, 5),  # on another stream
    event("kernel", "attention", 8, 10),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1, 3, 13, bytes=400),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 4, 7, 14, bytes=300),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 10, bytes=1),
    event("cuda_runtime", "cudaLaunchKernel", 5, 8),
    {"ph": "M", "cat": "kernel", "name": "thread_name"},
]


def test_copies_beside_kernels_and_the_times_without_a_kernel():
    found = summary(TRACE)
    assert found["seconds"] == 10
    assert found["kernel_seconds"] == 7
    assert found["out"] == {"seconds": 2, "beside_kernels": 2, "bytes": 400, "copies": 1, "streams": 1}
    assert found["back"] == {"seconds": 3, "beside_kernels": 1, "bytes": 300, "copies": 1, "streams": 1}
    assert found["share_of_copies_beside_kernels"] == pytest.approx(3 / 5)
    assert found["waiting_for_copies_seconds"] == 2
    assert found["share_waiting_for_copies"] == pytest.approx(0.2)
    assert found["idle_seconds"] == 1
    assert found["gaps"] == [{"at": 5, "seconds": 3, "copying": 2, "before": "attention"}]
    tenth = COLUMNS // 10
    assert found["bars"]["kernels"] == "@" * 5 * tenth + " " * 3 * tenth + "@" * 2 * tenth
    assert found["bars"]["out"] == " " * tenth + "@" * 2 * tenth + " " * 7 * tenth
    page = as_page(found, cuda=True)
    assert "| no kernel, a copy runs | 2.0 s | 20.0% |" in page
    assert "| out | 2.0 s | 100.0% | 400 B | 200 B | 1 |" in page
    assert "| 3.0 s | 5.0 s | 2.0 s | `attention` |" in page


def test_a_trace_without_copies_says_so_and_one_without_kernels_is_refused():
    found = summary([event("cpu_op", "aten::mm", 0, 1), event("cpu_op", "aten::add", 2, 3)])
    assert found["share_of_copies_beside_kernels"] is None
    assert any("no copies on a side stream" in line for line in as_page(found, cuda=False))
    with pytest.raises(RuntimeError, match="no kernel"):
        summary(TRACE[3:])
