"""Every command and every block of code that the pages and the templates print is run, or named here with the reason
why not. What takes minutes runs in `make release` (ALST_PAGES=all); the rest in every run of the tests."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from cases import ROOT, cells_of, make_model, text_of
from test_lab import checkout
from trainers import accelerate_here

from alstlib.base.config import RunConfig
from alstlib.base.reference import relative_error
from alstlib.runs import workers
from alstlib.runs.train import operators

ERRORS = "notebooks/silent_errors.md"
PAGES = ("README.md", "notebooks/training.md", "notebooks/runs.md", "notebooks/what_fits.md", ERRORS, "env/README.md",
         "notebooks/run.ipynb", "notebooks/finetune.ipynb")  # fmt: skip
ALL = os.environ.get("ALST_PAGES") == "all"
SPEC = "papermill_runs/specs/finetune.yaml"
BLOCK = re.compile(r"(?ms)^```\w*\n(.*?)^```|(?<=\n\n)((?:    [^\n]*\n(?:\n(?=    ))?)+)")
NO_CODE = ("alstlib/           the package;", "install.sh        makes or refreshes")
"""How blocks begin that hold lists of files."""

NOT_HERE = yaml.safe_load("""
make ablation: five minutes of both cores, and it changes .venv; test_cli.py runs sweeps
make lab: test_lab.py does this
git clone: needs a network
make setup: changes .venv, which is what runs this
make test: is this
env/wheelhouse.sh: needs a network, and gigabytes
env/gpu.sh: needs a GPU; its dry run is in test_gpu_steps.py
.venv/bin/alst verify: test_verify.py does this
"import alstlib\\nfrom trl": test_sft_trainer.py does this
alst finetune: test_finetune.py and tests/elsewhere run the command, on a CPU
docker build: needs Docker and a network
apptainer build: needs Apptainer and a network
"export ": settings of a cluster
"import alstlib\\n\\nhandle": test_vision.py does this
alst run SPEC --nodes: "needs a cluster: tests/slurm, test_nodes.py"
sbatch: "needs Slurm: tests/slurm"
MAX_JOBS=8 .venv/bin/python -m pip install: needs nvcc and an hour; `make resolve` asks for the version
.venv/bin/python -m pip install: needs a GPU; `make resolve` asks the index for the version
scontrol: "needs Slurm: tests/slurm"
scancel: "needs Slurm: tests/slurm"
""")
"""What is not run here, by how it begins, and why."""
QUICK = (".venv/bin/alst plan --model", "alst run SPEC --dry-run", ".venv/bin/alst status", "alst status [SPEC]")
"""How commands begin that are run each time."""
MINUTES = (".venv/bin/alst check", ".venv/bin/alst plan --machine", "alst run SPEC", "alst report SPEC",
           ".venv/bin/papermill notebooks/finetune.ipynb", "papermill notebooks/")  # fmt: skip
"""Commands that are run with ALST_PAGES=all; parameters of papermill are checked each time."""
RUN = (*QUICK, *MINUTES)
ANSWERS = {"alst status": (0, 1, 3), "alst check": (0, 1), "alst plan --machine": (0, 1)}
"""Exit statuses that say something of this machine: a row did not run, a link looks slow, the model does not fit."""
PYTHON = ("import alstlib, deepspeed\n", "out = alstlib.block_step(")
SILENT = "import torch\n"
"""How the blocks of the page on silent errors begin."""
FILES = "import alstlib\nfrom datasets import load_dataset"
TURNS = "import torch  # after the script above"
GRPO, TREE = "import alstlib\nfrom trl import GRPOConfig", "import alstlib\nimport torch\nfrom torch.nn.parallel"
HERE = {
    **yaml.safe_load("""
meta-llama/Llama-3.1-8B-Instruct: model
my_documents.jsonl: texts.jsonl
chats.jsonl: texts.jsonl
"seq_len: 131072": "seq_len: 64"
"steps: 1000": "steps: 2"
"steps: 500": "steps: 2"
-p data.seq_len 4096: -p data.seq_len 256 -p model.name tiny
"-y \\"options: {tiles": "-p model.name tiny -y \\"options: {tiles"
"""),
    "[SPEC]": SPEC, "SPEC": SPEC,
}  # fmt: skip
"""What stands for something of the reader's, or is too large for this machine, and what is put in its place."""
SMALL = yaml.safe_load("""
max_length=131072: max_length=64, use_cpu=True, bf16=False, max_steps=2, logging_steps=1, report_to=[]
sp=8: sp=2
SPTrainer(model: trainer = SPTrainer(model
").train()": ")\\ntrainer.train()"
""")
"""The same for the lines of the README that train on one's own files."""


def begins(code, known):
    """The longest of the known beginnings that this code has; empty for none."""
    return max((one for one in known if code.startswith(one)), key=len, default="")


def blocks(page):
    """The blocks of code of a page, or of the first cell of a notebook."""
    text = "".join(cells_of(page)[0]["source"]) + "\n" if page.endswith(".ipynb") else text_of(page)
    found = [fenced or re.sub(r"(?m)^    ", "", indented) for fenced, indented in BLOCK.findall(text)]
    return [block for block in found if not begins(block, NO_CODE)]


def commands(block):
    """The commands of a block for a shell, without comments; a block of Python as it is."""
    if re.match(r"import |out = ", block):
        return [block]
    made = []
    for line in block.splitlines():
        if made and made[-1].count('"') % 2:
            made[-1] += f"\n{line}"  # a text in quotes goes on
        else:
            made += [line] if '"' in line else re.sub(r"\s+# .*$", "", line).split(" && ")
    return made


PRINTED = [(page, command) for page in PAGES for block in blocks(page) for command in commands(block)]
SHELL = [(page, command) for page, command in PRINTED if begins(command, RUN)
         and begins(command, NOT_HERE) <= begins(command, RUN)]  # fmt: skip


def test_each_block_is_run_or_says_why_not():
    known = (*NOT_HERE, *RUN, *PYTHON, SILENT, FILES, GRPO, TURNS, TREE, "cd ")
    assert [(page, command) for page, command in PRINTED if not begins(command, known)] == []
    unused = {one for one in known if not any(begins(command, known) == one for _, command in PRINTED)}
    assert unused == set(), "no page has these"
    assert len(PRINTED) >= 30


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the checkout with this environment, a model with its tokenizer, and texts."""
    from alstlib.runs.corpus.reading import get_tokenizer

    folder = tmp_path_factory.mktemp("pages") / "alst"
    checkout(folder)
    (folder / ".venv").symlink_to(sys.prefix)
    for part in (make_model("llama", vocab_size=512), get_tokenizer("stdlib-bpe", vocab_size=512)):
        part.save_pretrained(folder / "model")
    texts = [json.dumps({"text": f"def f_{i}(x):\n    return x * {i}\n" * 5}) for i in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(texts))
    return folder


@pytest.mark.parametrize("page, command", SHELL, ids=lambda text: text[:60])
def test_a_command_runs_as_printed(clone, monkeypatch, page, command):
    begin = begins(command, RUN)
    for printed, here in HERE.items():
        command = command.replace(printed, here)
    if "papermill " in begin:
        monkeypatch.chdir(clone)  # where the data are
        _, _, given = command.partition("-y ")
        fields = yaml.safe_load(shlex.split(given)[0]) if given else {}
        workers.check(RunConfig.from_dict(fields), workers.FINETUNE if "finetune" in command else workers.ABLATION)
    if begin in MINUTES and not ALL:
        pytest.skip("takes minutes: make release")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(["bash", "-c", command], cwd=clone, env=env, capture_output=True, text=True, timeout=800)
    fine = next((codes for begin, codes in ANSWERS.items() if begin in command), (0,))
    assert ran.returncode in fine, f"{command}\n{ran.stdout}\n{ran.stderr}"
    assert "Traceback" not in ran.stderr


def loop(rank, world, code):
    """The losses of the page's loop on two batches of each rank."""
    operators.leave_out()  # as runs do
    tokens = torch.randint(0, 64, (2, 1, 48), generator=torch.Generator().manual_seed(rank))
    batches = [{"input_ids": t, "labels": t} for t in tokens]
    names = {"model": make_model("llama"), "dataloader": batches, "seen": []}
    exec(code, names)
    return names["seen"]


@pytest.mark.parametrize("by_blocks", [False, True], ids=["layers", "blocks"])
def test_the_loop_runs_as_printed(ranks2, by_blocks):
    """With two ranks for eight, and with the line that the page puts in the place of two."""
    code, step = (next(block for _, block in PRINTED if block.startswith(begin)) for begin in PYTHON)
    assert "sp=8" in code
    assert "    engine.step()\n" in code
    code = code.replace("sp=8", "sp=2").replace("engine.step()\n", "engine.step()\n    seen.append(float(out.mean))\n")
    if by_blocks:
        code, count = re.subn(r"out = alstlib.causal_lm_loss.*\n    engine.backward.*\n", step, code)
        assert count == 1
    first, second = ranks2(loop, code)
    assert first == second
    assert len(first) == 4
    assert all(3 < loss < 6 for loss in first)


def logged(rank, world, name, codes, folder):
    """What the `trainer` of each of these scripts logs under this name. The scripts run one after the other."""
    names, found = {}, []
    with contextlib.chdir(folder), accelerate_here("ddp"):
        for code in codes:
            exec(code, names)
            found += [line[name] for line in names["trainer"].state.log_history if name in line]
    return found


def test_the_lines_of_the_readme_run_as_printed(ranks2, clone):
    """Those that train on one's own files, with small things for what needs GPUs."""
    (code,) = (block for _, block in PRINTED if block.startswith(FILES))
    for printed, here in {**HERE, **SMALL}.items():
        code = code.replace(printed, here)
    first, second = ranks2(logged, "loss", [code], str(clone))
    assert len(first) == 2
    assert first == second


def test_the_scripts_with_rewards_run_as_printed(ranks2, tmp_path):
    codes = [block for begin in (GRPO, TURNS) for _, block in PRINTED if block.startswith(begin)]
    assert len(codes) == 2
    first, second = ranks2(logged, "reward", codes, str(tmp_path))
    assert len(first) == 4
    assert first == second
    assert all(-1 <= reward <= 1 for reward in first)


def steps_of_trees(rank, world, code):
    """The last step of the page's script."""
    names = {}
    exec(code, names)
    return names["step"]


def test_the_script_with_trees_runs_as_printed(ranks2):
    (code,) = (block for _, block in PRINTED if block.startswith(TREE))
    first, second = ranks2(steps_of_trees, code)
    assert torch.equal(first.loss, second.loss)
    assert (first.computed, first.tokens) == (50, 131)
    assert [len(logps) for logps in first.logps] == [44, 45, 42]


def same(a, b):
    return relative_error(a, b) < 1e-12


SYMPTOMS = yaml.safe_load("""
The careless head gradient: same(wrong[1], 4 * truth[1])
The first copy of a shared key: >-
  same(torch.cat([attend(q[[r]], k[[r // 2]], v[[r // 2]], is_causal=True) for r in range(4)]),
  attend(q, *(copied.repeat_interleave(2, 0) for copied in (k, v)), is_causal=True))
The naive cut: >-
  [int((shift(own) == -100).sum()) for own in ids.chunk(4)] == [1, 1, 1, 1]
The mean of means: counts == [0, 0, 4, 3]
The forgotten state: >-
  same(bad[:12], whole[:12]) and all(relative_error(a[:12], b[:12]) > 0.1 for a, b in zip(wrong[1:], truth[1:]))
The wrong order of chunks: not same(in_chunks([8, 0, 4])[0], truth[0])
The dropped window: same(outputs[2][:, :6], outputs[0][:, :6])
""")
"""What the page says of each error beyond its gradients, from the names of its block."""
PARTS = ("**Symptom.** ", "**The check.** ", "**Who had it.** ")


@pytest.mark.parametrize("error", SYMPTOMS)
def test_a_silent_error_is_made_and_seen(error):
    said = dict(re.findall(r"(?ms)^## \d\. ([^\n]+)\n(.*?)(?=^## |\Z)", text_of(ERRORS)))
    assert list(said) == list(SYMPTOMS)
    assert [part for part in PARTS if said[error].count(part) != 1] == []
    ((block, _),) = BLOCK.findall(said[error])
    assert (ERRORS, block) in PRINTED
    assert len([line for line in block.splitlines() if line.strip()]) <= 20
    names = {}
    exec(block, names)
    off = {kind: [relative_error(*pair) for pair in zip(names[kind], names["truth"])] for kind in ("right", "wrong")}
    assert max(off["right"]) < 1e-12
    of_head = error == "The careless head gradient"  # all other gradients are right there
    assert [e > 0.2 for e in off["wrong"]] == [not of_head] * (len(off["wrong"]) - 1) + [True]
    assert eval(SYMPTOMS[error], {**globals(), **names})


def test_the_page_on_silent_errors_names_tests_that_are_there():
    named = re.findall(r"`(tests/[\w./]+)`", text_of(ERRORS))
    assert len(named) >= len(SYMPTOMS)
    assert [name for name in named if not (ROOT / name).exists()] == []
