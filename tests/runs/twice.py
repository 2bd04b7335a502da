"""A launcher for tests: it starts a command twice on this machine, as on two nodes, and waits for both.

`ALST_TEST_RANKS` names other ranks than 0 and 1; with an empty value no rank is set. The exit status is the largest."""

import os
import subprocess
import sys

ranks = os.environ.get("ALST_TEST_RANKS", "0 1").split() or [None, None]
started = []
for node, rank in enumerate(ranks):
    env = {**os.environ, "SLURMD_NODENAME": f"host{node}", **({} if rank is None else {"ALST_NODE_RANK": rank})}
    started.append(subprocess.Popen(sys.argv[1:], env=env, stdin=subprocess.DEVNULL))
print("both nodes are started", flush=True)
codes = [process.wait() for process in started]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
