"""The training script with ``--log-optimizer-stats`` on two CPU processes."""

import math
from collections import defaultdict
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.functional.script import train

MUON = """
    --optimizer muon --use-distributed-optimizer --muon-fp32-matmul-prec highest
    --log-interval 2 --tensorboard-log-interval 3 --lr-decay-style constant
""".split()


def scalars(folder):
    """Return what was written to TensorBoard: name -> {step: value}."""
    found = defaultdict(dict)
    for path in Path(folder).glob("events.*"):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            found[name] |= {event.step: event.value for event in events.Scalars(name)}
    return found


@pytest.mark.long
def test_scalars_are_written_at_logged_iterations(tmp_path):
    train(*MUON, "--log-optimizer-stats", "--tensorboard-dir", str(tmp_path))
    found = scalars(tmp_path)
    for name in ("TensorParallelMuon", "AdamW"):
        assert found[f"{name}/learning-rate"] == pytest.approx({6: found["learning-rate"][6]})
        assert 0 < found[f"{name}/weight-rms"][6] < 1
    muon = {k.partition("/")[2]: v for k, v in found.items() if k.startswith("TensorParallelMuon")}
    for what, (low, high) in {
        "update-rms": (0.01, 10),
        "exchange-bytes": (1, math.inf), "exchange-seconds": (0, 60),
        "orthogonalization-seconds": (0, 60),
    }.items():  # fmt: skip
        assert list(muon[what]) == [6]
        assert low < muon[what][6] < high
    # samples are 8 an iteration
    assert muon["update-rms vs samples"] == {48: muon["update-rms"][6]}
    assert found["optimizer/skipped-steps"] == {6: 0}
