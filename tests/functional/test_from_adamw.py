"""A run of transformers' Trainer with AdamW goes on with Muon."""

import contextlib
import copy
import io

import pytest
import torch

from tests.functional.test_other_trainers import arguments_of, example, losses_of
from tests.harness.each_rank import on_ranks
from tests.harness.log import listening
from tests.unit.fsdp2.models import whole

transformers = pytest.importorskip("transformers")

SHARDED = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
LAYOUTS = {
    "one process": (1, {"use_cpu": True}),
    "DDP": (2, {"use_cpu": True}),
    "FSDP2, one file": (2, {"fsdp": True, "fsdp_config": {"version": 2}}),
    "FSDP2, sharded": (2, {"fsdp": True, "fsdp_config": SHARDED}),
}


class Noting(transformers.TrainerCallback):
    """Notes what the optimizer has before its first step."""

    def __init__(self):
        self.found = {}

    def on_pre_optimizer_step(self, *_, optimizer, **__):
        inner = optimizer.optimizer
        if not self.found and hasattr(inner, "names"):
            self.rates = [group["lr"] for group in inner.param_groups]
            self.found = copy.deepcopy({n: dict(inner.state[p]) for p, n in inner.names.items()})


def run(cls, folder, options, resume=None):
    module = example("hugging_face_trainer")
    if "fsdp" in options:
        module.shard_on_cpus()
    noting = Noting()
    arguments = arguments_of(folder, per_device_train_batch_size=4, **options)
    data = {"train_dataset": module.make_data(), "callbacks": [noting]}
    trainer = cls(module.make_model("llama"), arguments, **data)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(resume_from_checkpoint=resume)
    return losses_of(trainer), noting


@pytest.mark.parametrize(("ranks", "options"), LAYOUTS.values(), ids=LAYOUTS)
@on_ranks("ranks", cpu=False)
def test_embeddings_and_norms_keep_adamws_state(ranks, options, tmp_path):
    module = example("hugging_face_trainer")
    before, _ = run(transformers.Trainer, tmp_path, options)
    with listening() as lines:
        start = f"{tmp_path}/checkpoint-4"
        losses, noting = run(module.MuonTrainer, tmp_path / "muon", options, start)
    assert losses[:4] == before[:4], "the steps before the checkpoint are the Trainer's"
    # data and schedule, which falls to zero in eight steps, go on where they were
    assert losses[4] == before[4]
    assert noting.rates == [pytest.approx(3e-3 * 4 / 8)] * len(noting.rates)
    for state in noting.found.values():
        moments = [whole(value) for key, value in state.items() if key != "step"]
        assert all(bool(value.any()) == ("exp_avg" in state) for value in moments)
        assert int(state.get("step", 0)) == (4 if "exp_avg" in state else 0)
    kept = {name for name, state in noting.found.items() if "exp_avg" in state}
    # its own checkpoints are read as ever
    again, _ = run(module.MuonTrainer, tmp_path / "more", options, f"{tmp_path}/muon/checkpoint-8")
    assert again[: len(losses)] == losses
    if torch.distributed.get_rank() == 0:
        assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= kept, kept
        matrices = ("0.mlp.up_proj", "1.self_attn.q_proj")
        assert {f"model.layers.{name}.weight" for name in matrices} <= noting.found.keys() - kept
        (line,) = (line for line in lines if "fresh" in line)
        assert "adam" in line, line
