"""A launcher for tests: it starts a command twice on this machine, as on two nodes, and waits for both.

Like srun it hands on signals, and ends the others `WAIT` seconds after one failed. `ALST_TEST_RANKS` names other ranks
than 0 and 1; with an empty value no rank is set. The exit status is the largest.
"""

import os
import signal
import subprocess
import sys
import time

WAIT = 4.0
ranks = os.environ.get("ALST_TEST_RANKS", "0 1").split()
started = []
for node in range(2):
    env = {**os.environ, "SLURMD_NODENAME": f"host{node}", **({"ALST_NODE_RANK": ranks[node]} if ranks else {})}
    started.append(subprocess.Popen(sys.argv[1:], env=env, stdin=subprocess.DEVNULL))
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: [process.send_signal(number) for process in started])
print("both nodes are started", flush=True)
failed = None
while None in (codes := [process.poll() for process in started]):
    time.sleep(0.1)
    failed = failed or (time.monotonic() if any(codes) else None)
    if failed and time.monotonic() > failed + WAIT:
        for process in started:
            process.terminate()
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
