"""Five ways through the pages: their commands, run in order, keep what the pages promise."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.optimizer import ParamKey
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_eopt import TorchOptimizerConfig, hugging_face
from megatron_eopt.fsdp2 import build_optimizer
from tests.functional.doc_commands import ROOT, blocks, commands_of
from tests.functional.test_commands import filled_in, shell
from tests.functional.test_other_trainers import example
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

PAGES = ROOT / "docs" / "how_to"


def commands(page: str, pattern: str) -> list[str]:
    """Return the commands of a page that match, in order."""
    found = [item.text for item in commands_of(PAGES / page) if re.search(pattern, item.text)]
    assert found, f"{page} has no command like {pattern}"
    return found


def run(text: str, folder: Path, more: str = "") -> str:
    """Run a command of a page in a folder of its own; return what it prints."""
    done = shell(f"{filled_in(text, folder, folder)} {more}", timeout=1200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def losses(output: str) -> dict[int, float]:
    """Return the trainer's loss of each iteration, which one of the ranks prints."""
    found = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", output)
    return {int(step): float(loss) for step, loss in found}


def test_from_adam_to_muon_and_to_another_layout(tmp_path, record_property):
    """choosing.md: the loss after the change of TP is that of a run that stays."""
    adam, muon, other = commands("choosing.md", r"megatron_eopt\.launch .*runs/(adam|muon)")
    more = "--train-iters 100 --lr 3e-3 --untie-embeddings-and-output-weights"
    # masks of dropout depend on the layout
    more += " --hidden-dropout 0 --attention-dropout 0"
    assert losses(run(adam, tmp_path, f"{more} --exit-interval 10"))[1] > 5
    log = run(muon, tmp_path, f"{more} --exit-interval 20")
    assert "starts fresh for muon: the checkpoint's is of adam" in log
    more += f" --exit-interval 22 --save {tmp_path}/further"
    change = " --tensor-model-parallel-size 2"
    assert change in other
    stays = losses(run(other.replace(change, ""), tmp_path, more))
    log = run(other, tmp_path, more)
    assert "keeps the padding of the checkpoint" in log
    moved = losses(log)
    off_loaded = losses(run(other, tmp_path, f"{more} --optimizer-cpu-offload"))
    assert sorted(stays) == [21, 22]
    record_property("change of the loss", f"{abs(moved[21] - stays[21]):.1e}")
    for step, loss in stays.items():
        assert moved[step] == pytest.approx(loss, abs=1e-3)
        assert off_loaded[step] == pytest.approx(loss, abs=1e-3)


def _rates_of_groups(folder: str) -> tuple[list[float], list[float], set[tuple[str, float]]]:
    trainer = example("hugging_face_trainer")
    rates: set[tuple[str, float]] = set()

    def noted(*arguments):
        optimizer = build_optimizer(*arguments)
        for group in optimizer.param_groups:
            rates.update((optimizer.names[param], group["lr"]) for param in group["params"])
        return optimizer

    hugging_face.build_optimizer = noted
    options = {"use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 8}
    options["overrides"] = {ParamKey(name="*layers.0.*"): {"lr_mult": 0.1}}
    whole, resumed = (
        trainer.train(trainer.make_model("qwen3"), folder, *saved, **options)
        for saved in ([], [f"{folder}/checkpoint-4"])
    )
    return whole, resumed, rates


def test_hugging_face_with_a_rate_per_group_of_layers(tmp_path):
    """other_trainers.md: the commands train, groups have their rates, and a run resumes."""
    for text in commands("other_trainers.md", r"hugging_face_trainer\.py"):
        text += f" --output {tmp_path}/commands"
        assert re.search(r"loss 4\.\d+ -> ", run(text, tmp_path))
    whole, resumed, rates = run_ranks(1, _rates_of_groups, str(tmp_path / "rates"), timeout=300)[0]
    assert resumed == whole
    for name, rate in rates:
        assert rate == pytest.approx(3e-4 if ".layers.0." in name else 3e-3), name


def test_fsdp2_saves_and_resumes_on_another_number_of_ranks(tmp_path):
    """fsdp.md: the resumed run has the losses of one that was not stopped."""
    whole, stopped, resumed = commands("fsdp.md", r"fsdp2_pretrain\.py")
    sizes = "--steps 20 --layers 1 --hidden 48 --heads 4 --seq-length 32 --tokens 20000"
    sizes += f" --checkpoint {tmp_path}/fsdp2"
    lines = [
        re.findall(r"step (\d+)/\d+: loss (\S+)", run(text, tmp_path, sizes))
        for text in (whole, stopped.replace("--stop 100", "--stop 10"), resumed)
    ]
    assert [step for step, _ in lines[2]] == [str(step) for step in range(11, 21)]
    expected = {step: float(loss) for step, loss in lines[0]}
    for step, loss in (*lines[1], *lines[2]):
        assert float(loss) == pytest.approx(expected[step], rel=1e-3)


@on_ranks(2)
def test_muon_takes_over_a_checkpoint_of_adam_in_an_own_loop(tmp_path):
    """fsdp.md: the snippet as it stands; momenta are zero, and second moments Adam's."""
    text = (PAGES / "fsdp.md").read_text()
    (snippet,) = (text for _, text in blocks(text, "python") if "optim.AdamW(model" in text)

    def made() -> torch.nn.Module:
        torch.manual_seed(1)
        model = example("fsdp2_pretrain").GPT(1, 32, 4, 16)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        return fully_shard(model, mesh=mesh)

    model, again = made(), made()
    adam = torch.optim.AdamW(model.parameters())
    model(torch.arange(32).view(2, 16)).square().mean().backward()
    adam.step()
    dcp.save({"optimizer": get_optimizer_state_dict(model, adam)}, checkpoint_id=tmp_path)
    names = {"torch": torch, "dcp": dcp, "model": again, "folder": str(tmp_path)}
    imported = (TorchOptimizerConfig, build_optimizer, get_optimizer_state_dict)
    names |= {one.__name__: one for one in (*imported, set_optimizer_state_dict)}
    exec(snippet, names)
    state = names["optimizer"].state
    assert not state[again.blocks[0].up.weight]["momentum_buffer"].full_tensor().any()
    mine, theirs = state[again.embedding.weight], adam.state[model.embedding.weight]
    assert torch.equal(*(its["exp_avg_sq"].full_tensor() for its in (mine, theirs)))


def test_an_own_optimizer_is_compared(tmp_path):
    """extending.md: the examples train by their flags, and the first is in the table."""
    train, compare = commands("extending.md", r"--import examples/my_optimizer\.py")
    small = "--num-layers 1 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4"
    small += " --num-query-groups 4"
    (variant,) = commands("extending.md", r"--import examples/cautious_muon\.py")
    for command in (train, variant):
        assert "Held-out loss" in run(command, tmp_path, f"--steps 8 {small}")
    more = f"--steps 10 --seeds 1 --lr muon=1e-3 sign_per_matrix=1e-3 --out {tmp_path}/compare"
    assert re.search(r"sign_per_matrix .*\d\.\d", run(compare, tmp_path, f"{more} {small}"))


def test_a_plan_decides_between_layouts(tmp_path):
    """planning.md: the layouts of a sweep differ in what is printed of them."""
    (text,) = commands("planning.md", r"megatron-eopt sweep .*--tp 1 2 4 8")
    table = run(text, tmp_path).replace("│", "")
    rows = re.findall(r"(?m)^ *(\d+) +\d+ +\d+ +\d+ +(\S.*\S) *$", table)
    assert sorted(int(tp) for tp, _ in rows) == [1, 2, 4, 8]
    assert len({figures for _, figures in rows}) == 4
