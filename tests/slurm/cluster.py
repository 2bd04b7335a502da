"""A Slurm on this machine for the tests: munged, slurmctld, and one slurmd a node: two without and two with GPUs.

Debian's packages slurm-wlm and munge are installed where that may be done. Everything the daemons write is in one
temporary folder, they listen on free ports beside any other Slurm, and they end with the process that started them. The
GPUs do not exist: they are a file, and only what Slurm says about them can be tested.
"""

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from pathlib import Path

from cases import living, wait_for

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
MARK = "ALST_TEST_CLUSTER"
CPU_NODES, GPU_NODES, GPUS = ("n1", "n2"), ("g1", "g2"), 4
NODES = (*CPU_NODES, *GPU_NODES)
START_SECONDS, STOP_SECONDS = 60.0, 40.0

CONFIGURATION = """\
ClusterName=alst
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerNode=100
GresTypes=gpu
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=600
KillWait=30
SchedulerParameters=sched_interval=5,batch_sched_delay=1,bf_interval=5
{nodes}
PartitionName=cpu Nodes={cpu} Default=YES State=UP
PartitionName=gpu Nodes={gpu} State=UP
"""
"""What a cluster's own file says too, as far as it decides about a job: CPUs and memory are given out, a job that asks
for no memory gets little, and tasks are bound to their CPUs. `cred_expire` shortens the wait after a requeue."""


class Absent(RuntimeError):
    """There is no Slurm on this machine and none can be installed; says why."""


class Broken(RuntimeError):
    """A daemon or a job did not come to what was waited for; says what it said last."""


def install():
    """Install Debian's packages where one of the programs is missing.

    Raises:
        Absent: they cannot be installed.
    """
    missing = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    if not missing:
        return
    needs = f"no {', '.join(missing)} here: Debian's packages {' and '.join(PACKAGES)} have them"
    if os.geteuid() or not (apt := shutil.which("apt-get", path=PATH)):
        raise Absent(f"{needs}, which only root may install with apt-get")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run([apt, "-qq", *command], env=env, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise Absent(f"{needs}, and `apt-get {command[0]}` failed: {(done.stderr or done.stdout).strip()[-500:]}")


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


class Cluster:
    """The daemons, and what is asked of them. Use it in a `with` block, which ends all of them and all of their jobs.

    Raises:
        Absent: no Slurm is here, and none can be installed.
        Broken: a daemon did not start; the message has the end of its log.
    """

    def __enter__(self):
        install()
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # the names of sockets must be short
        self.mark, self.left = uuid.uuid4().hex, ()
        self.daemons = {}
        self.env = {**os.environ, "PATH": PATH, MARK: self.mark, "SLURM_CONF": str(self.folder / "slurm.conf")}
        try:
            self._configure()
            files = {"key-file": "key", "socket": "socket", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
            paths = [f"--{flag}={self.folder}/munge.{name}" for flag, name in files.items()]
            self._start("munged", "munged", "--foreground", "--force", *paths)
            self._await("munged", lambda: (self.folder / "munge.socket").exists())
            self._start("slurmctld", "slurmctld", "-D")
            self._await("slurmctld", lambda: self.run("scontrol", "ping").returncode == 0)
            for node in NODES:
                self._start(node, "slurmd", "-D", "-N", node)
            for node in NODES:
                self._await(node, lambda node=node: self.show("node", node).get("State") == "IDLE")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        """End the jobs, then the daemons. `left` are the command lines of what had to be killed after that."""
        if {"slurmctld", *NODES} <= set(self.daemons):
            self.run("scancel", f"--user={getpass.getuser()}")
            wait_for(lambda: not self.run("squeue", "-h").stdout.strip(), STOP_SECONDS)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
        wait_for(lambda: not self.processes(), 5)
        self.left = tuple(self.processes().values())
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in self.daemons.values():
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def processes(self):
        """Command lines of what was started here and lives, the daemons and their jobs."""
        return living(self.mark, MARK)

    def _configure(self):
        control, *ports = free_ports(1 + len(NODES))
        host, gpus = socket.gethostname().partition(".")[0], dict.fromkeys(GPU_NODES, f" Gres=gpu:{GPUS}")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20 * 9 // 10
        each = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory={memory}"
        text = CONFIGURATION.format(
            host=host, user=getpass.getuser(), folder=self.folder, control=control, cpu=",".join(CPU_NODES),
            gpu=",".join(GPU_NODES),
            nodes="\n".join(f"NodeName={n} Port={p} {each}{gpus.get(n, '')}" for n, p in zip(NODES, ports)),
        )  # fmt: skip
        devices = "".join(f"NodeName={node} Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n" for node in GPU_NODES)
        files = {"slurm.conf": text, "gres.conf": devices, "cgroup.conf": "CgroupAutomount=no\n"}
        for name, content in {**files, **{f"gpu{i}": "" for i in range(GPUS)}}.items():
            (self.folder / name).write_text(content)
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").touch(mode=0o600)
        (self.folder / "munge.key").write_bytes(os.urandom(128))

    def _start(self, name, program, *arguments):
        """Start a daemon that ends with this thread."""
        command = ["setpriv", "--pdeathsig", "TERM", shutil.which(program, path=PATH) or program, *arguments]
        with open(self.folder / f"{name}.out", "wb") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def _await(self, name, ready):
        """Wait until a daemon is ready.

        Raises:
            Broken: it ended, or is not ready after a minute.
        """
        daemon = self.daemons[name]
        if wait_for(lambda: daemon.poll() is not None or ready(), START_SECONDS) and daemon.poll() is None:
            return
        how = f"is not ready after {START_SECONDS:.0f} s" if daemon.poll() is None else f"ended: {daemon.returncode}"
        if name in NODES and daemon.poll() is None:
            node = self.show("node", name)
            how += f" ({node.get('State', 'unknown to slurmctld')}: {node.get('Reason', 'no reason is given')})"
        raise Broken(f"{name} {how}; the end of its log:\n{tail(self.folder / f'{name}.out')}")

    # What is asked of it

    def run(self, *command, **options):
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60, **options)

    def show(self, what, name):
        """The fields that `scontrol show` gives for a job or a node; empty where it knows none of this name."""
        return dict(re.findall(r"(\S+?)=(.*?)(?=\s+\S+=|\s*$)", self.run("scontrol", "-o", "show", what, name).stdout))

    def wait(self, job, states, seconds):
        """What Slurm says of a job when it is in one of these states, such as "COMPLETED FAILED".

        Raises:
            Broken: it is in none of them in time; says where it is, and how its log ends.
        """
        found = {}

        def there():
            with contextlib.suppress(subprocess.TimeoutExpired):  # slurmctld lost the question: it is asked again
                found.update(self.show("job", job))
            return found.get("JobState") in states.split()

        if wait_for(there, seconds):
            return found
        where = f"{found.get('JobState', 'unknown')} ({found.get('Reason', '')}), not {states}, after {seconds:.0f} s"
        raise Broken(f"job {job} is {where}; the end of its log:\n{tail(Path(found.get('StdOut', '/dev/null')))}")


def tail(path, characters=3000):
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")[-characters:]
    return "nothing"
