"""Examples of other trainers run over the real packages, and the page shows them as they are."""

import argparse
import importlib.util
import re
import sys
import sysconfig
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.fsdp2 import ParamKey, build_optimizer
from tests.functional.doc_commands import ROOT, blocks
from tests.functional.test_alone import HERE, run
from tests.harness import run_ranks
from tests.harness.programs import finished
from tests.unit.fsdp2.models import config, eager


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def test_the_page_shows_the_examples_as_they_are():
    page = blocks((ROOT / "docs/how_to/other_trainers.md").read_text(), "python")
    for name in ("accelerate_loop", "lightning_module", "torchtitan_optimizer"):
        text = (ROOT / "examples" / f"{name}.py").read_text()
        assert len([block for _, block in page if block in text]) == 1


class Net(nn.Sequential):
    """A convolutional net of each kind of layer that the page names."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3, groups=8)
        self.conv = nn.Conv2d(8, 16, 3)
        self.flat, self.head = nn.Flatten(), nn.Linear(16 * 4, 5)


def test_the_page_of_plain_pytorch_trains_and_resumes(tmp_path, caplog, capsys, monkeypatch):
    caplog.set_level("INFO", "megatron_eopt")
    # without a C++ compiler's half a minute
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    names = {}
    for _, text in blocks((ROOT / "docs/how_to/pytorch.md").read_text(), "python")[:2]:
        exec(text, names)

    def batches(step):
        made = torch.Generator().manual_seed(step % 2)
        images = torch.randn(16, 3, 8, 8, generator=made)
        return images, images.mean((1, 2, 3)).argsort().argsort() % 5

    def lines(name, stop=None):
        names["train"](Net(), batches, 40, tmp_path / name, "cpu", stop)
        return capsys.readouterr().out.splitlines()

    whole = lines("whole")
    assert [*lines("parts", 9), *lines("parts")] == whole
    losses = [float(line.split()[-1]) for line in whole]
    assert losses[-1] < losses[0] - 0.1
    routed = re.findall(r"\| (\w+)\.weight +\| [\dx ]+ \| (\w+)", caplog.text)
    adam = {"stem": "adam", "norm": "adam", "deep": "adam", "head": "adam"}
    assert dict(routed) == adam | {"conv": "muon"}


def fsdp2_pretrain(folder, stop=None, resume=False):
    sizes = {"steps": 20, "layers": 1, "hidden": 48, "heads": 4, "seq_length": 32, "batch_size": 16}
    sizes |= {"checkpoint": Path(folder), "stop": stop, "resume": resume}
    text = {"text": Path(sysconfig.get_paths()["stdlib"]), "suffix": ".py", "tokens": 20000}
    module, lines = example("fsdp2_pretrain"), []
    module.print = lambda line, **_: lines.append(line)
    args = argparse.Namespace(config=ROOT / "examples/muon_on_fsdp2.yaml", **sizes, **text)
    module.train(args, torch.device("cpu"))
    return [float(re.search(r"loss (\S+)", line)[1]) for line in lines]


def test_the_plain_loop_trains_and_resumes_on_another_number_of_ranks(tmp_path):
    losses, _ = run_ranks(2, fsdp2_pretrain, str(tmp_path / "whole"), cpu=False)
    first, _ = run_ranks(2, fsdp2_pretrain, str(tmp_path / "half"), 10, cpu=False)
    (second,) = run_ranks(1, fsdp2_pretrain, str(tmp_path / "half"), None, True, cpu=False)
    assert [*first, *second] == pytest.approx(losses, rel=1e-3)
    assert 5.4 < losses[0] < 5.7  # ln 257 at the start
    assert losses[-1] < losses[0] - 0.5
    text = (ROOT / "examples" / "fsdp2_pretrain.py").read_text()
    assert not re.search(r"(?m)^(from|import) megatron[. ]", text)


def hugging_face(folder, batch, **options):
    """Return losses of Llama and Qwen3-MoE, which are those of a run that resumes, too."""
    trainer, found = example("hugging_face_trainer"), []
    options |= {"disable_tqdm": True, "per_device_train_batch_size": batch}
    for kind in ("llama", "qwen3_moe"):
        found.append(trainer.train(trainer.make_model(kind), f"{folder}/{kind}", **options))
        model, checkpoint = trainer.make_model(kind), f"{folder}/{kind}/checkpoint-4"
        if "fsdp" not in options:  # then the Trainer by itself does not read experts
            model = type(model).from_pretrained(checkpoint, dtype=torch.float32)
        assert trainer.train(model, f"{folder}/{kind}", checkpoint, **options) == found[-1]
    return found


def arguments_of(folder, **options):
    """Return the example's arguments of a Trainer, but for some."""
    usual = {"max_steps": 8, "save_steps": 4, "logging_steps": 1, "report_to": []}
    usual |= {"learning_rate": 3e-3, "weight_decay": 0.1}
    usual |= {"disable_tqdm": True, "dataloader_pin_memory": False}
    return transformers.TrainingArguments(str(folder), **usual | options)


def losses_of(trainer):
    """Return the losses that a Trainer has logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_of_the_page(tmp_path, caplog):
    caplog.set_level("INFO", "megatron_eopt")
    module = example("hugging_face_trainer")
    page = (ROOT / "docs/how_to/other_trainers.md").read_text()
    (shown,) = (text for _, text in blocks(page, "python") if "MuonTrainer(" in text)
    names = {"model": module.make_model("llama"), "data": module.make_data()}
    names["arguments"] = arguments_of(tmp_path / "page", use_cpu=True)
    exec(shown, names)
    found = losses_of(names["trainer"])
    assert "| model.layers.*.mlp.up_proj.weight (2)" in caplog.text
    assert "is not applied" not in caplog.text  # the Trainer clips
    options = {"use_cpu": True, "disable_tqdm": True}
    assert found == module.train(module.make_model("llama"), str(tmp_path / "other"), **options)
    assert found[-1] < found[0] - 0.2


def test_a_trainer_of_unconnected_processes_is_refused(tmp_path, monkeypatch):
    """Each would train a model of its own, as processes on CPUs do without ``use_cpu``."""
    module = example("hugging_face_trainer")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="use_cpu=True"):
        module.train(module.make_model("llama"), str(tmp_path))


def test_an_own_loop_of_unconnected_processes_is_warned_of(monkeypatch, caplog):
    """As of accelerate's on CPUs without ``cpu=True``."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    build_optimizer(Net(), config("adam"))
    assert "WORLD_SIZE is 2, but processes are not connected" in caplog.text


def test_connected_processes_that_accelerate_does_not_use_are_told_too(tmp_path):
    """On CPUs, accelerate connects them in any case, the Trainer's and those of an own loop."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    done = finished(*command, "-m", "tests.functional.unconnected", tmp_path, timeout=200)
    for message in ("use_cpu=True", "pass cpu=True to accelerate's Accelerator"):
        assert message in done.stderr, done.stderr[-3000:]


def resumed_rates(folder, checkpoint, learning_rate, overrides):
    """Return the rates of the resumed step and the next one, by parameter."""
    module, rates = example("hugging_face_trainer"), []

    class Noting(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_, optimizer, **__):
            groups = optimizer.param_groups
            names = optimizer.optimizer.names
            rates.append({names[p]: group["lr"] for group in groups for p in group["params"]})

    trainer = module.MuonTrainer(
        module.make_model("llama"),
        arguments_of(folder, use_cpu=True, learning_rate=learning_rate),
        train_dataset=module.make_data(),
        callbacks=[Noting()],
        config_overrides={ParamKey(name=n): {"lr_mult": mult} for n, mult in overrides.items()},
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return rates


def test_a_resumed_trainer_has_the_rates_of_its_own_arguments_and_overrides(tmp_path):
    """Also where there are more groups of parameters, or fewer, than in the checkpoint."""
    of_checkpoint = {"*layers.0.*": 0.1}
    resumed_rates(tmp_path, None, 0.008, of_checkpoint)
    for overrides in (of_checkpoint, {}, {"*embed*": 0.5}, of_checkpoint | {"*layers.1.*": 0.5}):
        rates = resumed_rates(tmp_path / "new", f"{tmp_path}/checkpoint-4", 0.004, overrides)
        # the default schedule falls to zero in eight steps
        for step, found in enumerate(rates, 4):
            for name, rate in found.items():
                mult = [overrides[key] for key in overrides if key.strip("*") in name] or [1]
                assert rate == pytest.approx(0.004 * mult[0] * (8 - step) / 8)
        assert len(rates) == 4


def lightning(folder, devices):
    from lightning.pytorch.callbacks import ModelCheckpoint

    found = []
    for resume in (None, f"{folder}/step=4.ckpt"):
        saved = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
        options = {"callbacks": [saved], "enable_progress_bar": False, "accelerator": "cpu"}
        found.append(example("lightning_module").train(devices, resume, **options))
    assert found[1] == found[0][4:]
    return found[0]


def sharded(folder):
    """Return losses of two processes, for which accelerate shards as it does on GPUs alone."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    example("hugging_face_trainer").shard_on_cpus()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(gradient_accumulation_steps=2, fsdp_plugin=plugin)
    loop = list(example("accelerate_loop").train(accelerator))
    accelerator.save_state(f"{folder}/state")
    accelerator.load_state(f"{folder}/state")
    trained = hugging_face(folder, 4, fsdp=True, fsdp_config={"version": 2})
    return [*trained, loop, lightning(f"{folder}/lightning", 2)]


def test_examples_train_and_resume_alone_and_sharded(tmp_path):
    from accelerate import Accelerator

    alone = hugging_face(tmp_path / "alone", 8, use_cpu=True)
    together = run_ranks(2, sharded, str(tmp_path), timeout=300, cpu=False)
    assert all(ours[:2] == [pytest.approx(one, rel=1e-3) for one in alone] for ours in together)
    alone.append(list(example("accelerate_loop").train(Accelerator())))
    for losses in (*alone, lightning(tmp_path / "one", 1), *together[0]):
        assert losses[-1] < losses[0] - 0.05


def test_torchtitan_trains():
    pytest.importorskip("torchtitan")
    model, losses = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64)), []
    settings = example("torchtitan_optimizer").MuonOptimizers.Config
    optimizers = settings(file=f"{ROOT}/examples/muon_on_fsdp2.yaml").build(model_parts=[model])
    for _ in range(8):
        optimizers.load_state_dict(optimizers.state_dict())
        losses.append(nn.functional.cross_entropy(model(torch.arange(64)), torch.arange(64)))
        losses[-1].backward()
        optimizers.step()
        optimizers.zero_grad()
    assert losses[-1] < losses[0] - 0.02


@eager
@pytest.mark.parametrize("split", [True, False])
def test_gate_and_up_of_transformers_step_as_separate_matrices(split):
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
    from transformers.models.phi3 import modeling_phi3 as phi3

    def parts(name, weight):
        halves = split and "gate_up" in name and "whole" not in name
        pieces = weight.chunk(2, dim=-2) if halves else [weight]
        return [part for piece in pieces for part in (piece if piece.dim() == 3 else [piece])]

    experts = example("hugging_face_trainer").make_model("qwen3_moe").model.layers[0].mlp.experts
    sizes = {"hidden_size": 8, "intermediate_size": 12}
    # transposed, gate and up in turn, and with biases of all experts in one parameter
    whole = gpt_oss.GptOssExperts(gpt_oss.GptOssConfig(**sizes, num_local_experts=3))
    dense = phi3.Phi3MLP(phi3.Phi3Config(**sizes))
    model = nn.ModuleDict({"inner_experts": experts, "dense": dense, "whole_experts": whole})
    fused = {name: p for name, p in model.named_parameters() if "bias" not in name}
    for param in fused.values():
        param.data, param.grad = torch.randn_like(param), torch.randn_like(param)
    apart = nn.ParameterList(m.detach().clone() for item in fused.items() for m in parts(*item))
    grads = (m.clone() for name, param in fused.items() for m in parts(name, param.grad))
    for param, grad in zip(apart, grads, strict=True):
        param.grad, param.eopt_split = grad, "whole"
    optimizer = build_optimizer(model, config(muon_split_gated=split))
    assert [len(group["params"]) for group in optimizer.param_groups] == [6, 2]
    optimizer.step()
    build_optimizer(apart, config()).step()
    for ours, theirs in zip((m for i in fused.items() for m in parts(*i)), apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_the_trainer_of_hugging_face_needs_no_megatron(tmp_path):
    run(HERE / "trainer_alone.py", tmp_path)
