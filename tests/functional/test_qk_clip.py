"""A training whose attention logits grow, with the trainer's flags and on two CPU processes."""

import re

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.functional.script import train

THRESHOLD = 1.0
# steps so long that the logits grow at once
GROWING = """
    --optimizer muon --lr 5e-2 --weight-decay 0 --train-iters 12 --lr-decay-style constant
    --hidden-dropout 0 --attention-dropout 0 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --log-max-attention-logit --print-state-checksum --save-interval 6
    --tensorboard-log-interval 1 --group-query-attention --num-query-groups 2
""".split()
CLIPPED = [*GROWING, "--qk-clip", "--qk-clip-threshold", str(THRESHOLD), "--qk-clip-alpha", "0.5"]


def logged(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.value for event in events.Scalars("max_attention_logit")]


def checksums(output):
    return re.findall(r"state checksum: (\w+) \(saved, iteration 12\)", output)


def test_logits_stay_below_the_threshold_and_a_resumed_run_is_the_same(tmp_path):
    places = {name: str(tmp_path / name) for name in ("free", "clipped", "first", "second")}
    train(*GROWING, "--tensorboard-dir", places["free"])
    first = ["--save", places["first"], "--tensorboard-dir", places["clipped"]]
    straight = train(*CLIPPED, *first, "--tensor-model-parallel-size", "2", "--sequence-parallel")
    free, clipped = logged(places["free"]), logged(places["clipped"])
    assert max(free) > 2 * THRESHOLD
    # a logit is clipped after it has been seen: the first steps' growth is theirs
    assert max(clipped[-4:]) < 1.1 * THRESHOLD
    resumed = train(
        *[*CLIPPED, "--tensor-model-parallel-size", "2", "--sequence-parallel"],
        *["--load", places["first"], "--ckpt-step", "6", "--save", places["second"]],
    )
    assert len(checksums(straight)) == 1
    assert checksums(straight) == checksums(resumed)
