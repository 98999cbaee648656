"""What the trainer's loading functions do otherwise, each by itself."""

from argparse import Namespace
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training import checkpointing

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint import trainer, vocabulary
from megatron_eopt.guard.contents import TRACKER, folder_name
from megatron_eopt.megatron_core.stored_weights import StoredWeights
from megatron_eopt.state.rule import LoadReport

OFF = ("ckpt_step", "exit_on_missing_checkpoint", "no_save_rng", "no_load_optim", "finetune")
FLAGS: dict[str, Any] = dict.fromkeys(OFF, False)
FLAGS |= {"save": None, "no_save_optim": True, "ckpt_format": "torch_dist"}


class Stored(StoredWeights):
    """A member of a chain of this package that stores nothing."""

    in_buffers = True

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []


OURS = SimpleNamespace(chained_optimizers=[Stored()], param_groups=[])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that loads from a folder."""
    args = Namespace(load=str(tmp_path), **FLAGS)
    monkeypatch.setattr(checkpointing, "get_args", lambda: args)
    of_rank = {"world_size": 1, "rank": 0}
    for group, (what, value) in product(("tensor", "pipeline", "expert"), of_rank.items()):
        name = f"get_{group}_model_parallel_{what}"
        monkeypatch.setattr(parallel_state, name, lambda value=value: value)
    return args


def write(run: Path, iteration: int, form: str = "dcp") -> Path:
    """Write a complete checkpoint of one rank."""
    folder = run / folder_name(iteration)
    if form == "torch":
        (folder / "mp_rank_00").mkdir(parents=True)
        torch.save({"iteration": iteration}, folder / "mp_rank_00" / "model_optim_rng.pt")
    else:
        dcp.save({"weight": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    return folder


def load(original: Callable[..., Any], optimizer: Any = None, **kwargs: Any) -> Any:
    return trainer._checked_load(original)(None, optimizer, None, "load", **kwargs)


@pytest.mark.parametrize(
    ("code", "asked", "exists", "expected"),
    [
        (0, False, False, CheckpointError),
        (None, False, True, CheckpointError),
        (1, False, False, SystemExit),
        (0, True, False, SystemExit),
        (0, True, True, CheckpointError),
    ],
)
def test_a_load_that_ends_the_program_is_an_error_unless_asked_for(
    run, tmp_path, code, asked, exists, expected
):
    run.exit_on_missing_checkpoint = asked
    if exists:
        (tmp_path / TRACKER).write_text("2")
    with pytest.raises(expected):
        load(mock.Mock(side_effect=SystemExit(code)))


@pytest.mark.parametrize(
    ("text", "notes"), [("class input value 1 and checkpoint value 2", 1), ("something else", 0)]
)
def test_another_schedule_names_the_flag(run, text, notes):
    with pytest.raises(AssertionError) as caught:
        load(mock.Mock(side_effect=AssertionError(text)))
    assert len(getattr(caught.value, "__notes__", [])) == notes


def test_all_state_is_loaded_and_the_flags_are_as_before(run):
    seen = []
    forms = DistributedOptimizer.checkpoint_fully_reshardable_formats

    def load_checkpoint(*_: Any, **kwargs: Any) -> tuple[int, int]:
        seen.append((vars(run).copy(), kwargs))
        seen.append(DistributedOptimizer.checkpoint_fully_reshardable_formats - forms)
        run.ckpt_format = "torch"
        return 2, 0

    skip = {"skip_load_to_model_and_opt": True}
    assert load(load_checkpoint, OURS, **skip) == (2, 0)
    assert load(load_checkpoint, SimpleNamespace(loads_itself=True), **skip) == (2, 0)
    (first, kwargs), by_bucket, (_, of_fsdp2), none = seen
    assert first == vars(run) | {"no_save_optim": False}
    assert (kwargs, of_fsdp2) == (skip, {"skip_load_to_model_and_opt": False})
    assert (by_bucket, none) == ({"dp_reshardable"}, set())
    assert vars(run) == {"load": run.load, **FLAGS}
    assert DistributedOptimizer.checkpoint_fully_reshardable_formats == forms


@pytest.mark.parametrize(
    ("saves_to", "last", "warned"),
    [(None, "6", False), ("load", "6", False), ("other", "6", True)]
    + [("other", last, False) for last in ("3", "2", "release", "?", None)],
)
def test_a_start_before_the_last_checkpoint_of_another_folder_is_warned_of(
    run, tmp_path, caplog, saves_to, last, warned
):
    run.load = str(tmp_path / "load")
    run.save = saves_to and str(tmp_path / saves_to)
    for name in ("load", "other"):
        (tmp_path / name).mkdir()
        if last is not None:
            (tmp_path / name / TRACKER).write_text(last)
    load(lambda *_, **__: (3, 0))
    assert ("begins at iteration 3" in caplog.text) == warned


@pytest.mark.parametrize("step", [None, 2])
def test_no_run_starts_anew_beside_a_complete_checkpoint(run, tmp_path, step):
    folder, run.ckpt_step = write(tmp_path, 2), step
    (tmp_path / "iter_0000003").mkdir()
    if step is None:
        with pytest.raises(CheckpointError, match=f"{folder.name} is a complete checkpoint"):
            load(lambda *_, **__: (0, 0))
    else:
        load(lambda *_, **__: (2, 0))


@pytest.mark.parametrize(
    ("tracker", "step", "expected"),
    [
        ("3", None, (3, False)),
        ("3", 2, (2, False)),
        ("release", None, (0, True)),
        ("release", 2, (0, True)),
        ("?", 2, (2, False)),
        ("?", None, None),
    ],
)
def test_a_step_that_is_asked_for_is_loaded(run, tmp_path, tracker, step, expected):
    (tmp_path / TRACKER).write_text(tracker)
    run.ckpt_step = step
    named = (0, True) if tracker == "release" else (3, False)
    read = trainer._at_the_step_asked_for(lambda _: named)
    with trainer._reading(run):
        if expected is None:
            with pytest.raises(CheckpointError, match="must hold the number"):
                read(str(tmp_path / TRACKER))
        else:
            assert read(str(tmp_path / TRACKER)) == expected
    if tracker != "?":
        # without a load, the tracker alone counts
        assert read(str(tmp_path / TRACKER)) == named


def test_without_a_load_the_tracker_alone_counts(run, tmp_path):
    (tmp_path / TRACKER).write_text("3")
    run.ckpt_step = 2
    assert trainer._at_the_step_asked_for(lambda _: (3, False))(str(tmp_path / TRACKER)) == (
        3,
        False,
    )


def test_a_folder_that_a_killed_save_has_left_is_read_where_it_is_whole(run, tmp_path):
    name = trainer._in_the_right_folder(checkpointing.get_checkpoint_name)
    place = write(tmp_path, 2).rename(tmp_path / "previous.iter_0000002")
    ends = "/mp_rank_00/model_optim_rng.pt"
    assert name(str(tmp_path), 2) == f"{tmp_path}/iter_0000002{ends}"
    with trainer._reading(run):
        assert name(str(tmp_path), 2) == f"{place}{ends}"
        assert name(str(tmp_path), 2, return_base_dir=True) == str(place)
        assert name(str(tmp_path), 2, release=True) == f"{tmp_path}/release{ends}"


@pytest.mark.parametrize(
    ("form", "wanted", "becomes"),
    [
        ("torch_dist", "torch_dist", "torch_dist"),
        ("torch_dist", "torch", "torch_dist"),
        ("torch", "torch_dist", "torch"),
        ("fsdp_dtensor", "fsdp_dtensor", "fsdp_dtensor"),
        ("torch_dcp", "fsdp_dtensor", "fsdp_dtensor"),
        ("torch_dcp", "torch_dist", None),
        ("fsdp_dtensor", "torch", None),
        ("torch_dist", "fsdp_dtensor", None),
    ],
)
def test_the_format_is_the_checkpoints(run, tmp_path, form, wanted, becomes):
    folder, run.ckpt_format = write(tmp_path, 2), wanted
    take = trainer._taking_the_format(lambda *_: form)
    assert take(str(folder), run) == form
    assert run.ckpt_format == wanted
    with trainer._loading(SimpleNamespace()):
        if becomes is None:
            with pytest.raises(CheckpointError, match=f"is of format {form}"):
                take(str(folder), run)
        else:
            assert take(str(folder), run) == form
            assert run.ckpt_format == becomes


@pytest.mark.parametrize("flag", ["", "no_load_optim", "finetune"])
def test_sharded_state_is_not_read_from_the_files_of_ranks(run, tmp_path, flag):
    folder = write(tmp_path, 2, "torch")
    setattr(run, flag or "unused", True)
    take = trainer._taking_the_format(lambda *_: "torch")
    with trainer._loading(OURS):
        if flag:
            assert take(str(folder), run) == "torch"
        else:
            with pytest.raises(ConfigurationError, match="the distributed optimizer shards"):
                take(str(folder), run)


def test_a_rank_needs_a_file_of_its_own(run, tmp_path, monkeypatch):
    folder = write(tmp_path, 2, "torch")
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    with trainer._reading(run):
        trainer._check_files(folder)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    with trainer._reading(run), pytest.raises(CheckpointError, match=r"mp_rank_01/.*not exist"):
        trainer._check_files(folder)


@pytest.mark.parametrize("loads_state", [True, False])
@pytest.mark.parametrize("optimizer", [OURS, SimpleNamespace(), None], ids=["ours", "core", "no"])
def test_layers_of_gpt_are_no_layers_of_a_hybrid_model(run, optimizer, loads_state):
    read = trainer._refusing_layers_of_gpt(lambda *_: ("layers", loads_state))
    with trainer._loading(optimizer):
        if loads_state and optimizer is OURS:
            with pytest.raises(CheckpointError, match="is of a GPTModel"):
                read()
        else:
            assert read() == ("layers", loads_state)


@pytest.mark.parametrize(
    ("form", "wanted", "matched"),
    [
        ("fsdp_dtensor", {"optimizer": {"state": 1}}, [{"state": 1}]),
        ("fsdp_dtensor", {"model": 1}, []),
        ("fsdp_dtensor", None, []),
        ("torch_dist", {"optimizer": {"state": 1}}, []),
    ],
)
def test_state_in_the_format_of_fsdp_is_matched_before_it_is_read(
    run, monkeypatch, form, wanted, matched
):
    run.ckpt_format, found = form, []
    monkeypatch.setattr(trainer, "_match_fsdp_dtensor", lambda _, state: found.append(state))

    def load(load_dir: str, args: Namespace, sharded_state_dict: Any = None) -> list[Any]:
        return [*found]

    assert trainer._matching_fsdp_dtensor(load)(run.load, run, wanted) == matched


@pytest.mark.parametrize(
    ("exists", "optimizer", "matches"),
    [(True, OURS, True), (False, OURS, False), (True, SimpleNamespace(), False)],
    ids=["ours", "no checkpoint", "megatron-core's"],
)
def test_only_a_checkpoint_is_matched_with_our_optimizer(
    run, tmp_path, monkeypatch, exists, optimizer, matches
):
    found: list[Any] = []

    def match(storage: Any, state: Any, catalogue: Any) -> LoadReport:
        found.append((storage, state, [*catalogue.values]))
        return LoadReport()

    monkeypatch.setattr(trainer.fsdp_dtensor, "match", match)
    (tmp_path / TRACKER).write_text("2")
    if exists:
        write(tmp_path, 2)
    with trainer._loading(optimizer), trainer._reading(run):
        trainer._match_fsdp_dtensor(run, {"state": 1})
    assert found == ([(OURS.chained_optimizers[0], {"state": 1}, ["weight"])] if matches else [])


def test_storages_that_megatron_core_reads_by_itself_are_left_to_it(monkeypatch):
    monkeypatch.setattr(trainer.MultiStorageClientFeature, "is_enabled", lambda: True)
    with trainer._reading(Namespace()):
        assert trainer._read.get() is None
        trainer._check_read()
    load = trainer._matching_torch_dist(lambda load_dir, rank0: load_dir)
    assert load("msc://run", rank0=True) == "msc://run"
    assert vocabulary._saved_args("msc://run", Namespace()) is None


@pytest.mark.parametrize(
    ("fields", "rate", "saved"),
    [
        (None, 0.3, {"max_lr": 0.2}),
        ({}, 0.3, {"max_lr": 0.2}),
        ({"use_checkpoint_opt_param_scheduler": False}, 0.3, {"max_lr": 0.2}),
        ({"use_checkpoint_opt_param_scheduler": True}, 0.2, {"max_lr": 0.2}),
        # saved groups without rates, and none
        ({"use_checkpoint_opt_param_scheduler": True}, 0.3, {"lr": 0.2}),
        ({"use_checkpoint_opt_param_scheduler": True}, 0.3, None),
    ],
)
def test_only_a_scheduler_that_asks_for_them_gets_the_checkpoints_rates(fields, rate, saved):
    steps: list[int] = []
    scheduler = None if fields is None else SimpleNamespace(step=steps.append, **fields)
    group = {"max_lr": 0.3, "params": []}
    storage = Stored()
    storage.twins = [saved if saved and "max_lr" in saved else None]
    storage.loaded_groups = [saved] if saved else []
    chain = SimpleNamespace(chained_optimizers=[storage], param_groups=[group])
    with trainer._rates_kept(chain, scheduler):
        group["max_lr"] = 0.1  # the trainer's, which it writes into all groups
    assert group["max_lr"] == rate
    assert steps == ([] if scheduler is None else [0])
