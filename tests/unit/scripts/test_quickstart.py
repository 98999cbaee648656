"""What the quickstart says at its end."""

from torch.utils.tensorboard import SummaryWriter

from scripts import quickstart


def test_the_validation_set_is_held_out_and_not_the_test_set(tmp_path, capsys):
    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        for step in (1, 2):
            writer.add_scalar("lm loss", 5.0 - step, step)
        for loss in (3.25, 3.5, 9.0):
            writer.add_scalar("lm loss validation", loss, 2)
    quickstart.report(tmp_path)
    said = capsys.readouterr().out
    assert "Held-out loss: 3.2500 (nats per byte, step 2)" in said
    assert (tmp_path / "loss.png").exists()


def test_a_run_without_evaluations_is_reported(tmp_path, capsys):
    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        writer.add_scalar("lm loss", 4.0, 1)
    quickstart.report(tmp_path)
    said = capsys.readouterr().out
    assert "First training loss: 4.0000" in said
    assert "Held-out" not in said


def test_reasons_are_found_before_the_launchers_report():
    lines = ["usage: ...", "pretrain_gpt.py: error: invalid choice: 'muonn'"] * 2 + ["..."] * 30
    assert quickstart.reasons(lines) == ["pretrain_gpt.py: error: invalid choice: 'muonn'"]
