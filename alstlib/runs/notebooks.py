"""Execute a notebook with papermill. When this process ends, its kernel ends, and so do the ranks that the kernel
started."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from alstlib.runs import launch, torchrun
from alstlib.runs.processes import sigterm_interrupts

KERNEL_START_SECONDS = 600  # papermill's 60 are short where many processes share the cores
KERNEL_SECONDS = 60.0  # for an interrupted notebook: longer than the launcher's own grace
INTERRUPTED_SECONDS = 3.0  # in which papermill writes down a cell that has cleaned up


def load_papermill() -> Any:
    """papermill, without what it imports for nothing: a grammar of addresses in all scripts, which jsonschema compiles
    for seconds where that package is installed, and which no notebook is held against."""
    modules: Any = sys.modules
    modules.setdefault("rfc3987_syntax", None)
    try:
        return importlib.import_module("papermill")
    finally:
        if modules.get("rfc3987_syntax") is None:
            modules.pop("rfc3987_syntax", None)


def execute(
    notebook: Path, output: Path, parameters: Mapping[str, Any], watch: Callable[[], None] = lambda: None,
    running: Callable[[], bool] = lambda: False, folder: Path = Path(),
) -> Exception | None:  # fmt: skip
    """Execute `notebook` with papermill in a kernel of the running Python, in `folder`; returns what it raised.

    `watch` is called about once a second meanwhile. On KeyboardInterrupt (and SIGTERM) the kernel is interrupted, so
    that the cell cleans up, and killed if it does not, or if no run of it is `running`; then the exception goes on.
    """
    papermill = load_papermill()
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    kernels: list[AsyncKernelManager] = []
    raised: list[Exception] = []
    done = threading.Event()  # not Thread.join: interrupted, it takes a living thread for dead (Python < 3.13)

    class Kernel(AsyncKernelManager):
        """The kernel `python3`, always this interpreter, whatever kernel specs are installed."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            kernels.append(self)

        @property
        def kernel_spec(self) -> KernelSpec:
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=40"]
            # a scheduler may send its warning to every process of a job, and a terminal Ctrl-C to all that were started
            # from it: they are this one's. While a cell runs the kernel listens to SIGINT, as this process tells it
            argv = ["sh", "-c", 'trap "" USR1 INT; cd "$0" && exec "$@"', str(folder), *argv]
            env = {"PYTHONPATH": torchrun.import_path(os.environ.get("PYTHONPATH"))}
            return KernelSpec(argv=argv, env=env, display_name="Python 3 (ipykernel)", language="python")

    def work() -> None:
        try:
            papermill.execute_notebook(
                str(notebook), str(output), parameters=dict(parameters), kernel_name="python3", language="python",
                progress_bar=False, kernel_manager_class=Kernel, start_timeout=KERNEL_START_SECONDS,
            )  # fmt: skip
        except Exception as e:
            raised.append(e)
        finally:
            done.set()

    def signal_kernel(number: int) -> None:
        for kernel in kernels:
            if pid := getattr(kernel.provisioner, "pid", None):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    # papermill works in a thread: interrupted itself, it would leave a kernel that nobody told to clean up
    with sigterm_interrupts():
        try:
            threading.Thread(target=work, daemon=True).start()
            while not done.wait(launch.POLL_SECONDS):
                watch()
        except KeyboardInterrupt:
            logging.getLogger("papermill").setLevel(logging.CRITICAL)  # it would tell how the kernel ended
            try:
                for _ in range(4):
                    signal_kernel(signal.SIGINT)  # which it ignores outside of cells
                    if done.wait(KERNEL_SECONDS / 4 if running() else INTERRUPTED_SECONDS) or not running():
                        break
            finally:
                if not done.is_set():
                    signal_kernel(signal.SIGKILL)
                    for kernel in kernels:
                        kernel.cleanup_connection_file()
            raise
    return raised[0] if raised else None
