"""Loading onto ranks: the weights of plain loading, and no rank's host takes more than its part and one tensor."""

import gc
import time

import pytest
import torch
from cases import by_own_names, check_refused, make_model, same

from alstlib.base.config import RunConfig
from alstlib.hf.loading.models import load_model
from alstlib.hf.loading.ranks import load_on_first, place
from alstlib.hf.loading.zero_config import engine_config
from alstlib.hf.saving import full_weights
from alstlib.planner.measure.ledger import Ledger, storage_bytes


def config_of(stage, **changes):
    fields = {"zero_stage": stage, "offload_optimizer": False, "dtype": "fp32", **changes}
    return engine_config(RunConfig.from_dict(by_own_names(fields)), [10_000], False)


def arrives(rank, world, run, tied, stage, offload):
    unplaced = load_on_first(run, torch.float32, torch.device("cpu"))
    model, plain = unplaced.model, load_model(run, torch.float32)
    assert storage_bytes(model.parameters()) < 1000, "weights are there before they are placed"
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    place(unplaced, config_of(stage, offload_params=offload))
    want, got = dict(plain.named_parameters()), {n: w.clone() for n, w in full_weights(model)}
    assert [*got] == [*want]
    assert same(got, want)
    assert same(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert {hasattr(p, "ds_id") for p in model.parameters()} == {stage == 3}
    assert model.training
    assert not unplaced.waiting


@pytest.mark.parametrize("stage, offload", [(0, False), (2, False), (3, False), (3, True)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_weights_are_those_of_plain_loading(ranks2, tmp_path, tied, stage, offload):
    make_model(tie_word_embeddings=tied, num_hidden_layers=3).save_pretrained(tmp_path)
    saved = RunConfig(model={"name": str(tmp_path), "config": {"num_hidden_layers": 2}})
    for run in (saved, RunConfig(model={"name": "tiny", "config": {"tie_word_embeddings": tied}}, optim={"seed": 3})):
        ranks2(arrives, run, tied, stage, offload)


def refused(rank, world, run, says):
    check_refused(says, load_on_first, run, torch.float32, torch.device("cpu"))


def test_what_rank_0_meets_is_raised_on_every_rank(ranks2, tmp_path):
    make_model("llama", num_hidden_layers=2).save_pretrained(tmp_path)
    run = RunConfig(model={"name": str(tmp_path), "config": {"num_hidden_layers": 3}})
    ranks2(refused, run, r"has no weights for model\.layers\.2\.")
    model = make_model("llama", num_hidden_layers=2)
    model.get_input_embeddings().weight.data[-1, 3] = float("nan")  # a token that no document has
    model.save_pretrained(tmp_path / "parts")
    run = RunConfig(model={"name": str(tmp_path / "parts")})
    ranks2(refused, run, "its weight model.embed_tokens.weight is not finite")


def peak_while_loading(rank, world, run):
    gc.collect()  # of what other tests left, nothing goes meanwhile
    with Ledger() as ledger:  # on a CPU it sees host memory
        start = ledger.device_bytes
        unplaced = load_on_first(run, torch.float32, torch.device("cpu"))
        sizes = [p.numel() * 4 for p in unplaced.model.parameters()]
        place(unplaced, config_of(3))
        for _ in range(100):  # gloo's thread may hold what it sent last for a moment after the ranks go on
            gc.collect()
            if (kept := ledger.device_bytes - start) < sum(sizes) / 2 + 50_000:
                break
            time.sleep(0.05)
    return {"peak": ledger.device_peak - start, "kept": kept, "whole": sum(sizes), "largest": max(sizes)}


def test_only_rank_0_holds_the_model_while_it_loads(ranks2):
    run = RunConfig(model={"name": "tiny", "config": {"vocab_size": 2048, "hidden_size": 512, "num_hidden_layers": 6}})
    first, other = ranks2(peak_while_loading, run)
    whole, largest, rest = first["whole"], first["largest"], 50_000  # buffers, and what the ranks tell each other
    assert whole > 3 * largest
    assert first["peak"] <= whole + largest + rest
    assert other["peak"] <= whole / 2 + largest + rest  # a half is its part
    assert abs(first["kept"] - whole / 2) < rest
    assert abs(other["kept"] - whole / 2) < rest
