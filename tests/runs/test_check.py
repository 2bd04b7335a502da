"""`alst check`: two ranks measure, what looks wrong is named, and a plan stands on what was measured."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest
from cases import check_refused

from alstlib.base.config import RunConfig
from alstlib.planner.gpus import rates_of
from alstlib.planner.machine import read_machine
from alstlib.planner.model_shapes import read_shape
from alstlib.planner.prediction import predict
from alstlib.runs import check

GIB = 2**30
NAMES = ("matmul", "attention_forward", "attention_backward", "host", "host_memory", "link")


def measure(rank, world, out):
    from alstlib.runs.train import machine_rates

    small = {
        "LENGTH": {"cpu": 64},
        "ROWS": {"cpu": 16},
        "MESSAGE": {"cpu": 4096},
        "WEIGHTS": {"cpu": 1000},
        "DISK_BYTES": 2**20,
    }
    run = RunConfig(model={"name": "tiny"}, engine={"world_size": world, "sp": world})
    with mock.patch.multiple(machine_rates, **small):
        return machine_rates.MeasureRates(run, out)()


def test_two_ranks_measure_and_a_plan_reads_it(ranks2, tmp_path, capsys, alst):
    metrics = ranks2(measure, tmp_path)[0]
    assert metrics["ranks"] == metrics["ranks_of_node"] == len(metrics["links"]) == len(metrics["places"]) == 2
    rates = metrics["rates"]
    for name in (*NAMES, "all_reduce", "disk_read"):
        assert len(rates[name]) == 2, name
        assert min(rates[name]) > 0, name
    assert "network" not in rates
    check.tell(metrics, [])
    text = capsys.readouterr().out
    assert all(part in text for part in ("all-to-all in a node", "ranks 2, nodes 1"))
    assert text.endswith("nothing looks wrong\n")

    def planned(path):
        """The machine that the results say, and seconds of a step on it."""
        (tmp_path / "result.json").write_text(json.dumps({"metrics": metrics}))
        machine = read_machine(path)
        run = RunConfig(model={"name": "tiny", "dtype": "fp32"}, engine={"sp": 2})
        return machine, predict(read_shape("tiny"), run, machine, 4096).seconds["matrix products"]

    machine, seconds = planned(tmp_path)
    assert (machine.gpus, machine.device, machine.gpu_memory) == (2, "cpu", None)
    assert machine.disk_rate == 2 * min(rates["disk_write"] + rates["disk_read"])
    assert machine.rates.name.endswith(" as measured")
    assert machine.rates.matmul == min(rates["matmul"])
    rates["matmul"] = [2 * rate for rate in rates["matmul"]]
    assert planned(tmp_path / "result.json")[1] == pytest.approx(seconds / 2)
    assert "leave out --gpu" in alst(f"plan --machine {tmp_path} --gpu H100", 2)


def test_what_is_no_machine_is_refused(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps({"metrics": {"seq_len": 3}}))
    check_refused("name a result of `alst check`", read_machine, tmp_path)


H100 = rates_of("H100")


@pytest.mark.parametrize("changes, says", [
    ({}, ""),
    ({"matmul": [H100.matmul] * 7 + [H100.matmul / 2]},
     "matrix products: rank 7 on node-a reaches 50% of the ranks' median"),
    ({"link": [1e11] * 8}, "all-to-all in a node: 100 GB/s is 22% of the 450 GB/s that the planner's table has"),
    ({"links": [4e11] * 7 + [2e10]}, "link: rank 7 on node-a sends to rank 0 on node-a at 20 GB/s"),
    ({"from_host_not_pinned": [49e9] * 8}, "pinned memory is no faster than other memory"),
    ({"places": ["node-a 0/1", *["node-a 0/0"] * 7]}, "NUMA: rank 0's GPU is at node 0 and its cores are at"),
    ({"overheads": {"context": 30 * GIB, "nccl": 0}}, "device memory: 30.00 GiB are in use before any"),
])  # fmt: skip
def test_what_looks_wrong_is_named(changes, says):
    """In a node of eight H100."""
    rates = {name: [getattr(H100, name)] * 8 for name in NAMES}
    rates |= {"to_host": [50e9] * 8, "from_host": [50e9] * 8, "from_host_not_pinned": [20e9] * 8}
    node = {
        "device_name": "NVIDIA H100 80GB HBM3", "capability": 9, "ranks": 8, "ranks_of_node": 8, "nodes": 1,
        "gpu_memory": 79 * GIB, "host_memory": 1800 * GIB, "overheads": {"context": GIB, "nccl": 2 * GIB},
        "rates": rates, "links": [400e9] * 8, "places": [f"node-a {i // 4}/{i // 4}" for i in range(8)],
    }  # fmt: skip
    for name, value in changes.items():
        (rates if name in rates and isinstance(value, list) else node)[name] = value
    found = list(check.findings(node))
    assert len(found) == bool(says)
    assert "".join(found).startswith(says)


def test_the_numa_node_of_a_gpu(monkeypatch, tmp_path):
    from alstlib.runs.train import machine_rates

    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)
    (tmp_path / "0000:1b:00.0").mkdir()
    for text, node in (("1\n", 1), ("-1\n", None)):  # -1 where there is only one
        (tmp_path / "0000:1b:00.0" / "numa_node").write_text(text)
        assert machine_rates.numa_node(0, str(tmp_path)) == node
    assert machine_rates.numa_node(0, str(tmp_path / "nowhere")) is None
