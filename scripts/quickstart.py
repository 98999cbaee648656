"""Train a small byte-level GPT with Muon on the source code of Python's standard library.

Runs Megatron-Core's real trainer on two processes: on GPUs where there is one for each, else on the
CPU.
Further Megatron flags are passed through, for example --tensor-model-parallel-size 2.
"""

import argparse
import collections
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
from tqdm import tqdm

from megatron_eopt.base.errors import ConfigurationError, check_choice

PROCESSES, STEPS = 2, 360

SCRIPTS = Path(__file__).resolve().parent
# the processes share one pipe, so another's output can follow a number at once
LOSS = r"([-+]?(?:\d+(?:\.\d+)?(?:E[-+]\d+)?|NAN|INF))"
ITERATION = re.compile(rf"iteration\s+(\d+)/\s*(\d+) .*?lm loss: {LOSS}")
HELD_OUT = re.compile(rf"validation loss at iteration (\d+) \| lm loss value: {LOSS}")
CHECKPOINT = re.compile(r"successfully (saved|loaded) checkpoint from .*?iteration\s+(\d+)")
# of an exception without a message the name is all of the line
ERROR = re.compile(r"\b(\w*Error|error): |^(\[\w+\]: )?[\w.]*(Error|StopIteration)$")
SHOWN = 40
STEPS_A_LINE = 20
"""How many steps each line reports where there is no terminal for a bar."""

OWN_START = frozenset({"--load", "--ckpt-step", "--finetune", "--train-iters"})
"""Flags with which a run begins, or ends, elsewhere than the quickstart would have it."""


def model_flags() -> list[str]:
    """Return the flags of a GPT with about 3 million parameters that trains on any machine."""
    return [
        *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "8"),
        *("--group-query-attention", "--num-query-groups", "4", "--swiglu"),
        *("--ffn-hidden-size", "704", "--normalization", "RMSNorm", "--disable-bias-linear"),
        *("--position-embedding-type", "rope", "--seq-length", "128"),
        *("--max-position-embeddings", "128", "--attention-dropout", "0", "--hidden-dropout", "0"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "257"),
        *("--make-vocab-size-divisible-by", "64", "--untie-embeddings-and-output-weights"),
        # plain layers, so that the same model runs with and without a GPU
        *("--transformer-impl", "local", "--attention-backend", "unfused"),
        *("--no-masked-softmax-fusion", "--no-rope-fusion", "--no-persist-layer-norm"),
        *("--no-gradient-accumulation-fusion", "--use-cpu-initialization"),
    ]


def training_flags(steps: int, processes: int, out: Path, corpus: Path) -> list[str]:
    """Return the flags of data, schedule, logging and checkpoints."""
    interval = str(max(1, steps // 4))
    warm_up = min(steps - 1, max(1, min(20, steps // 10)))
    return [
        *("--micro-batch-size", "8", "--global-batch-size", str(max(16, 8 * processes))),
        *("--train-iters", str(steps), "--lr", "2e-3", "--min-lr", "2e-4"),
        *("--lr-decay-style", "cosine", "--lr-warmup-iters", str(warm_up)),
        *("--weight-decay", "0.1", "--clip-grad", "1.0"),
        *("--optimizer", "muon", "--use-distributed-optimizer"),
        # what the benchmarks page measured; at AdamW's usual size, this model learns more slowly
        *("--muon-scale-mode", "spectral", "--no-muon-nesterov"),
        *("--train-data-path", str(corpus / "train"), "--valid-data-path", str(corpus / "valid")),
        *("--test-data-path", str(corpus / "test"), "--data-cache-path", str(out / "cache")),
        *("--num-workers", "0", "--eval-interval", interval, "--eval-iters", "10"),
        *("--log-interval", "1", "--tensorboard-dir", str(out / "tensorboard")),
        *("--save", str(out / "checkpoints"), "--load", str(out / "checkpoints")),
        *("--save-interval", interval, "--ckpt-format", "torch_dist"),
        # a later run with other --steps goes on with its own schedule
        *("--exit-signal-handler", "--override-opt_param-scheduler", "--seed", "1234"),
    ]


def corpus_beside(out: Path) -> Path:
    """Return the folder of the data, which all runs beside each other share."""
    return out.parent / "quickstart-corpus"


def prepare_corpus(corpus: Path) -> None:
    """Write the standard library's source as training data, unless that is done already."""
    if (corpus / "test.idx").exists():
        print(f"Using the corpus in {corpus}")
        return
    print(f"Preparing the corpus in {corpus}: Python's standard library, byte by byte", flush=True)
    library = sysconfig.get_paths()["stdlib"]
    skipped = ("test", "tests", "site-packages", "idlelib", "__pycache__")
    command = [sys.executable, str(SCRIPTS / "prepare_corpus.py"), library, "--suffix", ".py"]
    command += ["--out", str(corpus), "--exclude", *skipped]
    # packages that look for a GPU while they are imported tell a newcomer nothing
    quiet = {"TORCH_LOGS": "-torch.utils.cpp_extension", "PYTHONWARNINGS": "ignore"}
    subprocess.run(command, check=True, env=quiet | os.environ)


def chosen_device() -> str | None:
    """Return what MEGATRON_EOPT_DEVICE says, if anything.

    Raises:
        ConfigurationError: If that is not ``cpu`` or ``cuda``, the devices of the trainer.
    """
    if (chosen := os.environ.get("MEGATRON_EOPT_DEVICE")) is not None:
        check_choice("MEGATRON_EOPT_DEVICE", chosen, ("cpu", "cuda"))
    return chosen


def on_gpu(processes: int) -> bool:
    """Whether the training processes will find a GPU each, or were told that they will."""
    if (chosen := chosen_device()) is not None:
        return chosen == "cuda"
    if shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listing.stdout.count("GPU ") >= processes


def stop_gently(launcher: subprocess.Popen[str]) -> None:
    """Ask the training processes to save and stop; the launcher then ends by itself.

    Where it has not started them yet, it is asked to end.
    """
    process = psutil.Process(launcher.pid)
    for one in process.children() or [process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGTERM)


def stop_at_once(launcher: subprocess.Popen[str]) -> None:
    """End the launcher and the training processes, which have sessions of their own."""
    process = psutil.Process(launcher.pid)
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


class Progress:
    """Shows how far a training is: a bar on a terminal, else a line every 20 steps.

    Args:
        quiet: Show the bar alone, and nothing where there is no terminal.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: tqdm[None] | None = None

    def read(self, line: str) -> None:
        """Take in one line of the trainer's log."""
        if match := ITERATION.search(line):
            self._step(int(match[1]), int(match[2]), float(match[3]))
        elif self._quiet:
            return
        elif match := HELD_OUT.search(line):
            self.say(f"step {match[1]}: held-out loss {float(match[2]):.3f}")
        elif match := CHECKPOINT.search(line):
            self.say(f"step {match[2]}: checkpoint {match[1]}")

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def _step(self, step: int, steps: int, loss: float) -> None:
        on_terminal = sys.stdout.isatty()
        if self._bar is None:
            # begins with the first step, so that the time left has no start-up in it
            size = shutil.get_terminal_size()  # a usual one where the terminal knows none
            place = {"file": sys.stdout, "ncols": size.columns, "nrows": size.lines}
            shown = {"disable": not on_terminal, "leave": not self._quiet}
            self._bar = tqdm(None, "Training", steps, initial=step, unit="step", **place, **shown)
            self._began = time.monotonic(), step
        self._bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        self._bar.update(step - self._bar.n)
        is_told = not (on_terminal or self._quiet)
        if is_told and (step % STEPS_A_LINE == 0 or step == steps):
            since, first = self._began
            each = (time.monotonic() - since) / max(1, step - first)
            left = tqdm.format_interval(each * (steps - step))
            self.say(f"step {step} of {steps}: loss {loss:.3f}, {left} left")


def train(
    flags: list[str], log: Path, *, processes: int = PROCESSES, quiet: bool = False
) -> tuple[int, bool]:
    """Run the training job and show how far it is.

    Args:
        flags: Of the trainer.
        log: What all that the job prints is added to.
        processes: How many the job has.
        quiet: Show the bar alone, and that on a terminal.

    Returns:
        The launcher's exit code and whether the user interrupted the run.
    """
    gpu = on_gpu(processes)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONUNBUFFERED": "1",
        "MEGATRON_EOPT_DEVICE": "cuda" if gpu else "cpu",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-addr", "127.0.0.1", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += [str(SCRIPTS / "pretrain_gpt.py"), *flags]
    command += ["--distributed-backend", "nccl" if gpu else "gloo"]
    interrupted = False
    launcher = subprocess.Popen(
        command,
        env=environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    progress = Progress(quiet)
    with log.open("a") as file, contextlib.closing(progress):
        while True:
            try:
                line = launcher.stdout.readline()
                if not line:
                    break
                file.write(line)
                progress.read(line)
            except KeyboardInterrupt:
                # it may have ended meanwhile
                with contextlib.suppress(psutil.NoSuchProcess):
                    if interrupted:
                        stop_at_once(launcher)
                        continue
                    interrupted = True
                    progress.say("Interrupted: saving a checkpoint (once more to stop at once)")
                    stop_gently(launcher)
    return launcher.wait(), interrupted


def reasons(lines: list[str]) -> list[str]:
    """Return what the last lines say of errors, once each: torchrun's report comes after it."""
    return list(dict.fromkeys(line for line in lines[-5 * SHOWN :] if ERROR.search(line)))


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return the TensorBoard scalars below ``folder``: name -> {step: value}.

    At the end Megatron writes the losses of the validation and of the test set under one name and
    step; the first of a file counts. Of files the last one counts, which goes on from the others.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for path in sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            latest = reversed(events.Scalars(name))
            found[name].update({event.step: event.value for event in latest})
    return found


def plot(curves: dict[str, dict[int, float]], path: Path) -> None:
    """Draw the training and held-out loss over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    train_loss, held_out = curves["lm loss"], curves["lm loss validation"]
    axes.plot(*zip(*sorted(train_loss.items()), strict=True), lw=1, label="training")
    if held_out:
        axes.plot(*zip(*sorted(held_out.items()), strict=True), "o-", label="held-out")
    axes.set(xlabel="training step", ylabel="cross entropy (nats per byte)", title="Byte-level GPT")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def to_compare(args: argparse.Namespace, flags: list[str]) -> tuple[str, str]:
    """Return another optimizer, and the command that repeats a run with it in its own folder.

    That is Adam, or Muon after a run with Adam.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--optimizer", default="muon")
    chosen, others = parser.parse_known_args(flags)
    other = "muon" if chosen.optimizer == "adam" else "adam"
    defaults = {"steps": STEPS, "processes": PROCESSES}
    values = {name: getattr(args, name) for name in defaults}
    own = [f"--{name}={value}" for name, value in values.items() if value != defaults[name]]
    out = args.out.with_name(f"{args.out.name}-{other}")
    given = [*own, *others, "--optimizer", other, "--out", str(out)]
    return other, shlex.join(["./scripts/quickstart.sh", *given])


def report(out: Path, other: str, next_command: str) -> None:
    """Print the held-out loss and where to look next, and draw the loss curve."""
    curves = scalars(out / "tensorboard")
    train_loss, held_out = curves["lm loss"], curves["lm loss validation"]
    print(f"\nFirst training loss: {train_loss[min(train_loss)]:.4f}")
    if held_out:
        last = max(held_out)
        print(f"Held-out loss: {held_out[last]:.4f} (nats per byte, step {last})")
    curve = ""
    # the extra "plots" of this package
    if find_spec("matplotlib") is not None:
        plot(curves, out / "loss.png")
        curve = f"Loss curve: {out / 'loss.png'}    "
    print(f"{curve}TensorBoard: tensorboard --logdir {out}")
    print(f"Next: the same run with {other.title()}: {next_command}")


def check_steps(steps: int, checkpoints: Path, flags: list[str]) -> None:
    """Refuse fewer steps than the checkpoint has that a run with these flags goes on from."""
    latest = checkpoints / "latest_checkpointed_iteration.txt"
    if not OWN_START.isdisjoint(flag.partition("=")[0] for flag in flags) or not latest.exists():
        return
    reached = latest.read_text().strip()
    if reached.isdecimal() and int(reached) > steps:
        rule = f"must be at least {reached}, the step of the checkpoint in {checkpoints}"
        raise ConfigurationError("--steps", steps, rule, "Give more steps, or another --out")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="./scripts/quickstart.sh", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: 360)")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="of training (default: 2)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/quickstart"),
        help="folder for all that is written, but for the data, quickstart-corpus beside it",
    )
    args, flags = parser.parse_known_args()
    for name in ("steps", "processes"):
        if (value := getattr(args, name)) < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    out = args.out.resolve()
    corpus, log = corpus_beside(out), out / "training.log"
    try:
        chosen_device()
        check_steps(args.steps, out / "checkpoints", flags)
        out.mkdir(parents=True, exist_ok=True)
        log.open("a").close()
        prepare_corpus(corpus)
    except ConfigurationError as error:
        parser.error(str(error))
    except OSError as error:
        place = f"{error.filename}: {error.strerror}"
        parser.error(f"--out {args.out}: cannot be written ({place}). Name another folder.")
    except subprocess.CalledProcessError as error:
        return error.returncode  # its own lines say why
    print(f"Training {args.steps} steps on {args.processes} processes. Output folder: {out}")
    print(f"The trainer's whole log: {log}", flush=True)
    own = training_flags(args.steps, args.processes, out, corpus)
    code, interrupted = train([*model_flags(), *own, *flags], log, processes=args.processes)
    if interrupted:
        print("Stopped. The same command goes on from the last checkpoint.")
        return 130
    if code:
        lines = log.read_text().splitlines()
        print(*reasons(lines[:-SHOWN]), *lines[-SHOWN:], sep="\n")
        print(f"Training failed (exit code {code}). The lines above are the end of {log}")
        return code
    report(out, *to_compare(args, flags))
    return 0


if __name__ == "__main__":
    # Also where the shell that started this ignores interrupts, and for a scheduler's SIGTERM.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
