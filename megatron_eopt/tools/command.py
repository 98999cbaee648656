"""The command ``megatron-eopt``: plan training runs, explain checkpoints, print recipes."""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from megatron_eopt.arguments import add_arguments, config_from_args
from megatron_eopt.base.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    check_integer,
    check_number,
)
from megatron_eopt.tools.explain import explain, show
from megatron_eopt.tools.plan.architectures import LEFT_OUT, Architecture, add_flags, from_flags
from megatron_eopt.tools.plan.machine import MACHINES, Machine
from megatron_eopt.tools.plan.model import SIZES, ParallelLayout
from megatron_eopt.tools.plan.planning import Plan, plan
from megatron_eopt.tools.plan.search import Found, layouts_of, search
from megatron_eopt.tools.plan.tables import (
    Sources,
    as_dict,
    show_plan,
    show_rates,
    show_sweep,
)
from megatron_eopt.tools.rates import (
    MODES,
    TP_MODES,
    Scale,
    Weights,
    carried,
    factor_of_all,
    suggested,
    weights_of,
)
from megatron_eopt.tools.recipe import NAMES, Recipe, name_of, recipe
from megatron_eopt.wrappers.config import EmergingOptimizerConfig


def gibibytes(text: str) -> float:
    """Return bytes for an argument in GiB; argparse's errors have this function's name."""
    return float(text) * 2**30


_NUMBERS: dict[str, tuple[Callable[[str], float], str]] = {
    "flops": (float, "peak FLOP/s, dense bfloat16"),
    "memory": (float, "memory bandwidth in bytes/s"),
    "link": (float, "bytes/s that it sends inside a node"),
    "network": (float, "bytes/s that it sends to other nodes"),
    "capacity": (gibibytes, "size of its memory in GiB"),
    "gpus": (int, "GPUs per node (default: 8)"),
    "efficiency": (float, "share of the peak that the step's products use (default: 0.6)"),
    "utilization": (float, "share of the peak that both passes use (default: 0.4)"),
}


_LISTED = ("tensor", "pipeline", "expert", "expert_tensor")
"""Sizes of which a sweep takes lists."""

_TOKENS = 2**22
"""Tokens per step of models whose batch size is not known."""

_SILENT = 2.0
"""Seconds after which a command says what it is doing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; ``argv`` defaults to the process's arguments."""
    # building the optimizer logs its settings, which are not part of the answer
    logging.disable(logging.WARNING)
    try:
        arguments, unknown = command_parser().parse_known_args(argv)
        if unknown:
            arguments.refuse(f"unrecognized arguments: {' '.join(unknown)}")
        if getattr(arguments, "model", None) is not None:
            # once more, with the recipe's settings as defaults, which flags override
            arguments = command_parser(recipe(arguments.model)).parse_args(argv)
        # names of split weights end as markup does: "weight[gate]"
        arguments.run(arguments, Console(markup=False))
    except (ConfigurationError, ConfigurationTypeError) as error:
        sys.stderr.write(f"megatron-eopt: {error}\n")
        return 2
    finally:
        logging.disable(logging.NOTSET)
    return 0


def command_parser(published: Recipe | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command's arguments.

    Args:
        published: The recipe of ``--model``, whose optimizer is the default.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-eopt",
        description="Plan training runs, inspect checkpoints and print recipes, without GPUs.",
        epilog="Example: megatron-eopt plan --model llama-3-8b --tp 4 --dp 16",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "predict memory, communication and time of one optimizer step"
    usage = "megatron-eopt plan [--model NAME] [--tp N] [--pp N] [--dp N] [--ep N] [FLAG ...]"
    one = commands.add_parser("plan", usage=usage, help=text, description=_about(text))
    sizes = one.add_argument_group("layout (sizes default to 1; without any, the recipe's)")
    for field, (short, flag, text) in SIZES.items():
        sizes.add_argument(f"--{short}", f"--{flag}", dest=field, type=int, metavar="N", help=text)
    _add_common(one, published)
    one.set_defaults(run=_plan)
    text = "find the layouts of some GPUs with the shortest iterations, or compare layouts"
    usage = "megatron-eopt sweep --ranks N [--model NAME] [--tp N ...] [--pp N ...] [FLAG ...]"
    many = commands.add_parser("sweep", usage=usage, help=text, description=_about(text))
    text = "layouts (without sizes, a search; with some, every combination, and 1 for the others)"
    sizes = many.add_argument_group(text)
    sizes.add_argument("--ranks", type=int, required=True, metavar="N", help="number of GPUs")
    for field in _LISTED:
        short, _, text = SIZES[field]
        sizes.add_argument(f"--{short}", dest=field, type=int, nargs="+", metavar="N", help=text)
    _add_common(many, published)
    many.set_defaults(run=_sweep)
    text = "show what a checkpoint contains and where it can be loaded"
    shown = commands.add_parser("explain", help=text, description=f"{text.capitalize()}.")
    shown.add_argument("checkpoint", type=Path, help="folder of a run (--save) or an iteration")
    shown.add_argument("--json", action="store_true", help="print JSON instead of a table")
    shown.set_defaults(run=_explain)
    text = "print the training flags of a published model, or list the models"
    made = commands.add_parser("recipe", help=text, description=f"{text.capitalize()}.")
    text = f"one of {', '.join(NAMES)}; leave it out to list them"
    made.add_argument("name", nargs="?", type=name_of, choices=NAMES, metavar="NAME", help=text)
    made.add_argument("--small", action="store_true", help="shrink the model for a test on a CPU")
    made.set_defaults(run=_recipe)
    text = "turn a learning rate between scale modes and tensor-parallel modes"
    usage = "megatron-eopt rate RATE --from MODE [--to MODE] [--model NAME] [FLAG ...]"
    rate = commands.add_parser("rate", usage=usage, help=text, description=f"{text.capitalize()}.")
    rate.add_argument("rate", type=float, metavar="RATE", help="learning rate of the old run")
    for side, what in (("from", "old"), ("to", "new")):
        mode = f"scale mode of the {what} run: {', '.join(MODES)} (default: spectral)"
        rate.add_argument(f"--{side}", dest=side, choices=MODES, default="spectral", help=mode)
        extra = f"--muon-extra-scale-factor of the {what} run (default: 1)"
        rate.add_argument(f"--{side}-extra", type=float, default=1.0, metavar="X", help=extra)
        cut = f"--muon-tp-mode of the {what} run (default: duplicated, whole matrices)"
        rate.add_argument(f"--{side}-tp-mode", choices=TP_MODES, default="duplicated", help=cut)
    rate.add_argument("--tp", type=int, metavar="N", help="tensor-parallel size, for blockwise")
    text = f"recipe whose weights are converted: {', '.join(NAMES)}"
    rate.add_argument("--model", type=name_of, choices=NAMES, metavar="NAME", help=text)
    add_flags(rate)
    rate.add_argument("--json", action="store_true", help="print JSON instead of a table")
    rate.set_defaults(run=_rate)
    for each in commands.choices.values():
        each.set_defaults(refuse=each.error)
    return parser


def _about(text: str) -> str:
    return (
        f"{text[0].upper()}{text[1:]}. It runs the real optimizer on tensors without data, as "
        "the busiest rank, and predicts its time from the GPU's data sheet. Choose a recipe with "
        "--model, give the model in Megatron's flags, or combine both: flags change the recipe."
    )


def _add_common(parser: argparse.ArgumentParser, published: Recipe | None) -> None:
    text = f"recipe to take the model from: {', '.join(NAMES)}"
    parser.add_argument("--model", type=name_of, choices=NAMES, metavar="NAME", help=text)
    add_flags(parser)
    gpus = parser.add_argument_group("GPU (defaults: its data sheet)")
    gpus.add_argument("--gpu", choices=MACHINES, default="H100", help="(default: H100)")
    for name, (kind, text) in _NUMBERS.items():
        gpus.add_argument(f"--gpu-{name}", type=kind, metavar="X", help=text)
    text = "tokens per step (default: the recipe's batch, or 4194304), for an iteration's time"
    parser.add_argument("--tokens", type=int, metavar="N", help=text)
    text = "sequences that a GPU computes at a time (default: 1)"
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--optimizer", default="muon", help="matrix optimizer (default: muon)")
    add_arguments(parser)
    if published is not None:
        parser.set_defaults(**published.optimizer_settings)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that says on stderr what is being done, unless it is done in seconds."""
    console, start = Console(stderr=True), time.monotonic()

    def tell(text: str) -> None:
        if console.is_terminal:
            status.update(f"{text} ...")
        elif time.monotonic() > start + _SILENT:
            sys.stderr.write(f"megatron-eopt: {text} ...\n")

    with console.status("...") as status:
        yield tell


def _sources(
    arguments: argparse.Namespace, architecture: Architecture, machine: Machine
) -> Sources:
    """Return the tokens of a step, and where they and all else of a plan come from."""
    published = recipe(arguments.model) if arguments.model else None
    flags = published.flags if published else {}
    batch, length = flags.get("global-batch-size"), architecture.seq_length
    where = f"recipe {arguments.model}"
    if arguments.tokens is not None:
        check_integer("--tokens", arguments.tokens)
        tokens, source = arguments.tokens, "--tokens"
    elif batch is not None:
        tokens, source = batch * length, f"{batch:,} sequences of {length:,}, {where}"
        source += " with your --seq-length" if arguments.seq_length is not None else ""
    else:
        text = "no batch size was published" if published else "no recipe"
        tokens, source = _TOKENS, f"the default, since {text}"
    settings = published.optimizer_settings if published else {}
    of_recipe = ", ".join(f"{n} {v}" for n, v in settings.items() if vars(arguments)[n] == v)
    left_out = [text for flag, text in LEFT_OUT.items() if flags.get(flag)]
    left_out += published.left_out if published else ()
    optimizer = f"{where}: {of_recipe}" if of_recipe else "flags and recommended defaults"
    check_integer("--micro-batch-size", arguments.micro_batch_size)
    estimate = f"an estimate: {machine.utilization:.0%} of the peak (--gpu-utilization), 1F1B"
    taken = {
        "tokens": source,
        "optimizer": optimizer,
        "passes": f"{estimate}, sequence parallelism",
        "activations": "an estimate: arXiv:2205.05198, fused attention, "
        f"{arguments.micro_batch_size} sequences at a time (--micro-batch-size)",
    }
    return Sources(tokens, arguments.micro_batch_size, taken, left_out)


@dataclasses.dataclass(frozen=True)
class _Request:
    """What the arguments ask for."""

    architecture: Architecture
    machine: Machine
    config: EmergingOptimizerConfig
    sources: Sources

    def plan(self, layout: ParallelLayout, tell: Callable[[str], None] = lambda _: None) -> Plan:
        """Plan one layout."""
        return plan(self.architecture, layout, self.machine, self.config, tell=tell, **self._batch)

    def search(self, ranks: int) -> Found:
        """Find the layouts with the shortest iterations."""
        sequences = max(1, round(self.sources.tokens / self.architecture.seq_length))
        layouts = layouts_of(
            self.architecture, self.machine, ranks, sequences // self.sources.micro_batch
        )
        return search(
            layouts,
            self.architecture,
            self.machine,
            self.plan,
            # it ends before the last one, so it does not tell how many there are
            progress=lambda layouts: _counted(iter(layouts)),
            **self._batch,
        )

    @property
    def _batch(self) -> dict[str, int]:
        return {"tokens": self.sources.tokens, "micro_batch": self.sources.micro_batch}


def _counted[T](layouts: Iterable[T]) -> Iterable[T]:
    """Return layouts, and show on stderr how many are done, unless it is done in seconds."""
    return tqdm(layouts, desc="layouts", delay=_SILENT)


def _architecture(arguments: argparse.Namespace) -> Architecture:
    """Return the model of the flags, which change that of the recipe, if one is named."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    return recipe(arguments.model).architecture(**given) if arguments.model else from_flags(given)


def _request(arguments: argparse.Namespace) -> _Request:
    """Check the arguments of plans."""
    flags, architecture = vars(arguments), _architecture(arguments)
    numbers = {n: number for n in _NUMBERS if (number := flags[f"gpu_{n}"]) is not None}
    machine = dataclasses.replace(MACHINES[arguments.gpu], **numbers)
    if not flags.get("use_distributed_optimizer", True):
        rule = "is not supported by plans, which assume sharded optimizer state"
        hint = "Remove it from the --optimizer-config file"
        raise ConfigurationError("use_distributed_optimizer", False, rule, hint)
    # a step's cost does not depend on the learning rate
    needed = {"lr": 1e-3, "bf16": True, "use_distributed_optimizer": True}
    config, _ = config_from_args(argparse.Namespace(**flags | needed))
    return _Request(architecture, machine, config, _sources(arguments, architecture, machine))


def _layout(arguments: argparse.Namespace, sources: Sources) -> ParallelLayout:
    """Return the layout of the flags, or else of the recipe, and note which."""
    given = {field: size for field in SIZES if (size := vars(arguments)[field]) is not None}
    if not given and arguments.model:
        sources.taken["layout"] = f"recipe {arguments.model}"
        return recipe(arguments.model).planned()
    text = "flags; sizes that are not given are 1" if given else "one GPU, without flags"
    sources.taken["layout"] = text
    return ParallelLayout(**given)


def _plan(arguments: argparse.Namespace, console: Console) -> None:
    # a large model keeps what it creates, and the process ends with the plan
    gc.disable()
    with _progress() as tell:
        request = _request(arguments)
        planned = request.plan(_layout(arguments, request.sources), tell)
    if arguments.json:
        console.print_json(json.dumps(as_dict(planned) | dataclasses.asdict(request.sources)))
    else:
        show_plan(planned, arguments.gpu, request.sources, console)


def _sweep(arguments: argparse.Namespace, console: Console) -> None:
    request = _request(arguments)
    lists = [vars(arguments)[field] for field in _LISTED]
    ranks = arguments.ranks
    found = _listed(request, ranks, *lists) if any(lists) else request.search(ranks)
    for sizes, reason in found.errors.items():
        sys.stderr.write(f"left out: {sizes}: {reason}\n")
    if arguments.json:
        console.print_json(json.dumps([as_dict(item) for item in found.plans]))
    else:
        title = f"{request.architecture.name} on {ranks} x {arguments.gpu}"
        show_sweep(found, title, request.machine.capacity, request.sources, console)


def _listed(
    request: _Request,
    ranks: int,
    tensor: list[int] | None,
    pipeline: list[int] | None,
    expert: list[int] | None,
    expert_tensor: list[int] | None,
) -> Found:
    """Plan every combination of the sizes that are listed, in their order."""
    found = Found()
    inside: Sequence[int | None] = expert_tensor if expert_tensor else [None]
    sizes = itertools.product(tensor or [1], pipeline or [1], expert or [1], inside)
    for tp, pp, ep, etp in _counted(list(sizes)):
        try:
            check_integer("--tp x --pp", tp * pp)
            if ranks % (tp * pp):
                rule = f"must be a multiple of tp x pp, here {tp} x {pp}"
                raise ConfigurationError("--ranks", ranks, rule, "Choose other sizes")
            layout = ParallelLayout(tp, pp, ranks // (tp * pp), ep, etp)
            found.plans.append(request.plan(layout))
        except ConfigurationError as error:
            found.errors[f"tp {tp}, pp {pp}, ep {ep}, etp {etp or tp}"] = error
    if not found.plans:
        raise next(iter(found.errors.values()))
    found.unfit = sum(plan.spare <= 0 for plan in found.plans)
    return found


def _recipe(arguments: argparse.Namespace, _: Console) -> None:
    if arguments.name is None:
        for name in NAMES:
            one = recipe(name)
            paper = one.sources["paper"]
            sys.stdout.write(f"{name:17}{one.title:18}{one.optimizer:31}{paper}\n")
    else:
        words = " ".join(recipe(arguments.name).words(small=arguments.small))
        # lines for a reader; one line for $(...), which would take backslashes as words
        separator = " \\\n    --" if sys.stdout.isatty() else " --"
        sys.stdout.write(words.replace(" --", separator) + "\n")


def _rate(arguments: argparse.Namespace, console: Console) -> None:
    check_number("RATE", arguments.rate, above=0)
    old = Scale(vars(arguments)["from"], arguments.from_extra)
    new = Scale(arguments.to, arguments.to_extra)
    modes = arguments.from_tp_mode, arguments.to_tp_mode
    has_model = arguments.model is not None or arguments.num_layers is not None
    same = len({mode == "blockwise" for mode in modes}) == 1
    factor = None if has_model else factor_of_all(old, new, same=same)
    if factor is None and "blockwise" in modes and arguments.tp is None:
        rule = "is missing: blockwise computes the blocks of tensor-parallel ranks"
        raise ConfigurationError("--tp", None, rule, "Pass the tensor-parallel size")
    if factor is None and not has_model:
        rule = "is missing: the new rate depends on the shapes of the model's matrices"
        hint = "Pass a recipe's name, or the model in Megatron's flags (--num-layers and others)"
        raise ConfigurationError("--model", None, rule, hint)
    rates: dict[str, float] = {}
    weights: dict[str, Weights] = {}
    if factor is not None:
        mean = arguments.rate * factor
    else:
        model = _architecture(arguments)
        tensor = 1 if arguments.tp is None else arguments.tp
        with _progress() as tell:
            tell(f"building one layer of each kind of {model.name}")
            blocks = {mode: weights_of(model, tensor, mode) for mode in {*modes, "duplicated"}}
        before, weights = (blocks[mode] for mode in modes)
        rates = {
            name: carried(arguments.rate, old, new, before[name].block, one.block)
            for name, one in weights.items()
        }
        # a matrix counts as a whole, whether ranks have blocks of it or all of it
        mean = suggested(rates, blocks["duplicated"])
    if arguments.json:
        console.print_json(json.dumps({"rates": rates, "one_rate": mean}))
    else:
        show_rates(rates, weights, mean, console)


def _explain(arguments: argparse.Namespace, console: Console) -> None:
    summary = explain(arguments.checkpoint)
    if arguments.json:
        console.print_json(json.dumps(dataclasses.asdict(summary)))
    else:
        show(summary, console)
