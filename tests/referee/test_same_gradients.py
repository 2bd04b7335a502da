"""The comparison that a GPU begins with, on a CPU: gradients that are right are called so, and wrong ones are not."""

import pytest
from same_gradients import SameGradients

from alstlib.base.config import RunConfig, row_config
from alstlib.planner.measure import verify


def test_a_gradient_that_is_off_by_a_tenth_is_found(tmp_path, monkeypatch):
    run = row_config("ours", RunConfig(model={"name": "tiny"}, data={"seq_len": 48}, engine={"sp": 1})).replace(
        options={"chunk": 8, "on_host": "hidden+kv"}
    )
    work, step = SameGradients(run, tmp_path), verify.attached_step
    for found in work()["gradients"].values():
        assert found["result"] == "exact"

    def off(*about):
        loss, grads = step(*about)
        name = "model.layers.0.mlp.up_proj.weight"
        return loss, {**grads, name: grads[name] * 1.1}

    monkeypatch.setattr(verify, "attached_step", off)
    for found in work()["gradients"].values():
        assert (found["result"], found["reason"]) == ("wrong", "gradient of model.layers.0.mlp.up_proj.weight")
        assert found["gradient"] == pytest.approx(0.1, rel=0.2)
