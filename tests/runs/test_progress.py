"""What a run says meanwhile: in a terminal, in a log, in a notebook, at the right pace; who holds a folder."""

import contextlib
import functools
import os
import pty
import re
import subprocess
import sys
import types

import pytest
from cases import ROOT, make_file, values_of

from alstlib.runs import locks, progress

ENDS = {"event": "end", "row": "r", "status": "ok"}


@pytest.fixture
def clock(monkeypatch):
    """In place of `time`: passes when it is told to."""
    clock = types.SimpleNamespace(now=1000.0)
    clock.time = clock.monotonic = lambda: clock.now
    monkeypatch.setattr(progress, "time", clock)
    return clock


def event(clock, step=1, **fields):
    return {"time": clock.now, "event": "step", "row": "r", "step": step, "steps": 9000, "eta_seconds": 60.0, **fields}


def test_time_left_counts_down(clock):
    e = event(clock)
    assert progress.describe(e, clock.now).endswith("0:01:00 left")
    assert progress.describe(e, clock.now + 45).endswith("15.0 s left")
    assert progress.describe(e, clock.now + 62).endswith("0 ms left")
    assert progress.time_left(e, clock.now + 90) == 0
    assert progress.describe({"time": clock.now, "message": "loading"}, clock.now + 7) == "loading  for 7.0 s"


def test_a_log_gets_lines_at_growing_intervals(clock, capsys):
    show = progress.Printer()
    for second in range(7200):
        show(event(clock, second)) if second % 2 else show.tick()
        clock.now += 1
    assert 20 <= len(capsys.readouterr().out.splitlines()) <= 26  # doubling to 10 minutes, then every 10 minutes
    show(ENDS)
    show.tick()
    assert capsys.readouterr().out == "r  ok\n"


def test_a_log_gets_a_line_for_each_tenth_of_the_steps(clock, capsys):
    """However long it took until the first: a job's log had one line for 60 fast steps."""
    show = progress.Printer()
    clock.now += 300
    show({"time": clock.now, "event": "load", "row": "r", "message": "loading"})
    for step in range(1, 61):
        clock.now += 0.5
        show(event(clock, step, steps=60))
    assert re.findall(r"step (\d+)/", capsys.readouterr().out) == [str(n) for n in range(6, 61, 6)]


def test_a_notebook_has_one_display_updated_once_a_second(clock, monkeypatch, capsys):
    shown = []

    def update(renderable):
        shown.append(renderable._repr_mimebundle_([], [])["text/plain"].strip())

    monkeypatch.setattr(progress, "in_kernel", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda *_, display_id: types.SimpleNamespace(update=update))
    show = progress.Printer()
    for i in range(100):
        show(event(clock, i, steps=200))
        clock.now += 0.1
    assert 9 <= len(shown) <= 11
    clock.now += 30
    show.tick()  # nothing new, but time passes
    assert shown[-1] == "r  step 99/200  29.9 s left"
    show(ENDS)
    assert shown[-1] == "r  ok"
    assert capsys.readouterr().out == ""


def test_a_terminal_has_one_line_rewritten():
    code = """
import time
from alstlib.runs.progress import Printer
show = Printer()
show({"event": "step", "row": "r", "message": "m" * 100})
time.sleep(1.1)
show({"event": "step", "row": "r", "message": "[bold]short", "step": 1, "steps": 2})
show({"event": "step", "row": "r", "message": "not shown: too soon"})
show({"event": "end", "row": "r", "status": "ok"})
print("next")
"""
    master, slave = pty.openpty()  # of no size, as under some tools
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    ran = subprocess.Popen([sys.executable, "-c", code], stdout=slave, env=env)
    os.close(slave)
    said = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(master, 4096):
            said += chunk
    os.close(master)
    assert ran.wait() == 0
    frames = [re.sub(r"\x1b\[[?\d;]*\w|\r", "", frame) for frame in said.decode().split("\x1b[2K")]  # wipes a line
    first, second, *_, last = (frame for frame in frames if frame)
    assert re.sub(r"\s", "", first) == "r" + "m" * 100  # a line that is too long is folded
    assert second.strip() == "r  step 1/2  [bold]short"
    assert [line.rstrip() for line in last.splitlines()] == ["r  ok", "next"]
    assert said.count(b"\x1b[?25h") >= said.count(b"\x1b[?25l") > 0, "the cursor is shown again"


def test_pace_is_silent_at_first_and_then_says_it_once_a_second(clock):
    said = []
    pace = progress.Pace(lambda **fields: said.append((clock.now - 1000, fields)), "saving", 100)
    for done in range(1, 101):
        clock.now += 0.5
        pace(done)
    assert said[0][1]["message"] == "saving, 2%"
    assert [(at, fields["eta_seconds"]) for at, fields in said] == [(at, pytest.approx(50 - at)) for at in range(1, 51)]


def test_tokenizing_tells_how_far_it_is():
    import datasets

    from alstlib.runs.corpus.samples import make_samples

    told = []

    def pace(tokens):
        told.append([tokens])
        return told[-1].append

    corpus = datasets.Dataset.from_dict({"input_ids": [list(range(10))] * 20})
    make_samples(corpus, None, 40, limit=2, pace=pace)[1]
    assert [(one[:5], max(one)) for one in told] == [([40, 10, 20, 30, 40], 40)] * 2


def test_a_folder_has_one_holder_who_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE_SECONDS", 0.0)
    assert locks.holder(tmp_path) is None
    me = f"process {os.getpid()}"
    with locks.hold(tmp_path) as note:
        note(row="alst")
        with pytest.raises(ValueError, match=f"in use by another run: {me} on .* since 20"), locks.hold(tmp_path):
            pass
        about = locks.holder(tmp_path)
        assert about["row"] == "alst"
        assert locks.describe({**about, "since": "noon", "host": "node7"}) == f"{me} on node7 since noon"
    assert locks.holder(tmp_path) is None
    with locks.hold(tmp_path):  # what an earlier one noted is gone
        assert locks.holder(tmp_path).keys() == {"pid", "host", "since"}


def test_a_full_disk_does_not_hide_what_went_wrong(tmp_path):
    """A file that may not grow stands for it: the lock's own note is not written, and the error is the block's."""
    code = """
import resource, signal, sys
from pathlib import Path
from alstlib.runs import locks
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
with locks.hold(Path(sys.argv[1])):
    raise LookupError("the first error")
"""
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert ran.stderr.strip().splitlines()[-1] == "LookupError: the first error"


def test_a_dead_process_holds_nothing(tmp_path):
    code = """
import sys, time
from pathlib import Path
from alstlib.runs import locks
with locks.hold(Path(sys.argv[1])):
    print(flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, cwd=ROOT) as child:
        child.stdout.readline()
        assert locks.holder(tmp_path)["pid"] == child.pid
        child.kill()
    with locks.hold(tmp_path):
        pass


DUMP = """Thread 0x00007f2 (most recent call first):
  File "/usr/lib/python3/threading.py", line 1 in wait

Current thread 0x00007f1 (most recent call first):
{}"""
READS = '  File "/lib/python3/ssl.py", line 9 in recv\n  File "/there/alstlib/data/prefetch.py", line 60 in read\n'
WAITS = """  File "/lib/torch/distributed/distributed_c10d.py", line 2 in all_reduce
  File "/there/alstlib/data/loader.py", line 190 in _all_reduce
  File "/there/alstlib/runs/train/ablation.py", line 20 in steps
"""


def test_after_a_timeout_the_rank_that_others_wait_for_comes_first(tmp_path):
    where = functools.partial(progress.whereabouts, tmp_path / "progress.jsonl", tmp_path)

    def ranks(*stacks):
        for rank, stack in enumerate(stacks):
            said = "a warning\n" + (DUMP.format(stack) if stack else "")
            make_file(tmp_path / f"logs/attempt_0/{rank}/stderr.log", said)

    assert where() == "it ended no step"
    writer = progress.Progress(tmp_path / "progress.jsonl")
    writer.emit("step", step=7, steps=9)
    writer.emit("load", message="saving")
    ranks(WAITS, WAITS, READS, "")
    says = (
        "the last step was 7 of 9; rank 2: in read (prefetch.py, line 60); rank 3: gave no answer (stopped, not started"
    )
    assert where().startswith(says)
    ranks(*[WAITS] * 4)
    assert where().count(": waited in _all_reduce (loader.py, line 190)") == 4


def failed(*ended, error_file=""):
    """torchrun's failures of ranks that ended so, with exit codes and in the order in which it lists them. The first
    has an error file."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    failures = {}
    for rank, code, *later in ended:
        file = "" if failures else str(error_file)
        failures[rank] = ProcessFailure(local_rank=rank, pid=30 + rank, exitcode=code, error_file=file)
        failures[rank].timestamp += sum(later)
    return failures


FIRST = """
[[2, -15], [0, -15], [1, 1]]    -> RankKilled -> rank 2 was ended by SIGTERM (Linux sends SIGKILL where the host's
[[1, -6], [0, -15], [2, 1]]     -> RankFailed -> rank 1 ended with exit status -6
[[1, 1], [0, -15], [2, -9, 30]] -> RankFailed -> rank 1 ended with exit status 1
[[1, 1], [2, 3, -5], [0, -15]]  -> RankFailed -> rank 2 ended with exit status 3
[[1, -11], [2, -9], [0, -15]]   -> RankKilled -> rank 1 was ended by SIGSEGV
[[1, 1], [2, -9], [0, -15]]     -> RankKilled -> rank 2 was ended by SIGKILL
"""


@pytest.mark.parametrize("ended, kind, says", values_of(FIRST))
def test_the_rank_that_failed_first(tmp_path, ended, kind, says):
    """What torchrun itself ended says nothing, and a rank that aborts has lost another."""
    found, why = progress.root_cause(failed(*ended), tmp_path)
    assert (found, why[: len(says)]) == (kind, says)


def test_the_error_of_a_rank_is_what_torchs_record_wrote(tmp_path, monkeypatch):
    """It raised before it could write a result."""
    from alstlib.runs.train import worker

    monkeypatch.setattr(worker, "begin", lambda: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["worker", "--config", "config.json", "--out", str(tmp_path)])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ZeroDivisionError):
        worker.run_worker("", lambda *_: None)
    failures = failed((1, 1), (0, -15), error_file=tmp_path / "error.json")
    says = "rank 1 ended with exit status 1: ZeroDivisionError: division by zero"
    assert progress.root_cause(failures, tmp_path) == ("RankFailed", says)


def test_the_error_of_a_rank_without_an_error_file(tmp_path):
    """The last line of a traceback in its log says it: of an import that failed, for one."""
    for logs, folder in ((tmp_path, "1"), (tmp_path / "node1.rank1", "0")):  # where the node's first rank is rank 1
        for said, why in (
            ("a warning", ""),
            (
                'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f(x\nImportError: no b\n',
                ": ImportError: no b",
            ),
        ):
            make_file(logs / f"id/attempt_0/{folder}/stderr.log", said)
            assert progress.root_cause(failed((1, 1), (0, -15)), logs)[1] == f"rank 1 ended with exit status 1{why}"
