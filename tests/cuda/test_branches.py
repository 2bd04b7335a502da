"""The list of branches for CUDA names every module that has one."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ASKS = re.compile(
    r'\.is_cuda|device\.type [!=]= "cuda"|torch\.cuda\.|kernel_device\([\w.]*device\.type\)|this_device\(\)|\bgpu: bool'
    r"|get_device_module|\baccelerator\(|own_device\("
)


def test_every_module_that_asks_for_cuda_is_listed():
    files = [*(ROOT / "alstlib").rglob("*.py"), *(ROOT / "papermill_runs/referee").glob("*.py")]
    asking = {p.relative_to(ROOT).with_suffix("").as_posix() for p in files if ASKS.search(p.read_text())}
    asking = {name.removeprefix("alstlib/") for name in asking}
    table = (HERE / "README.md").read_text().partition("| module |")[2].partition("\n\n")[0]
    assert asking == set(re.findall(r"^\| `([\w/]+)` \|", table, re.MULTILINE))
