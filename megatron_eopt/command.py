"""The command ``megatron-eopt``: print recipes, plan trainings, explain checkpoints."""

import argparse
import dataclasses
import itertools
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from megatron_eopt.arguments import add_arguments, config_from_args
from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError, check_integer
from megatron_eopt.explain import explain, show
from megatron_eopt.plan.architectures import add_flags, from_flags
from megatron_eopt.plan.machine import MACHINES
from megatron_eopt.plan.model import SIZES, Layout
from megatron_eopt.plan.planning import Plan, plan
from megatron_eopt.plan.tables import as_dict, show_plan, show_sweep
from megatron_eopt.recipe import NAMES, recipe

_NUMBERS = {
    "flops": (float, "dense bfloat16 operations a second"),
    "memory": (float, "bytes a second of its memory"),
    "link": (float, "bytes a second that it sends inside a computer"),
    "network": (float, "bytes a second that it sends to other computers"),
    "gpus": (int, "GPUs of a computer"),
    "efficiency": (float, "share of its rate that matrix products reach"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (None: the process's); returns its exit status."""
    arguments = argparse.Namespace()
    # what the parts that are built say of themselves
    logging.disable(logging.WARNING)
    try:
        command_parser().parse_args(argv, arguments)
        arguments.run(arguments, Console())
    except (ConfigurationError, ConfigurationTypeError) as error:
        sys.stderr.write(f"megatron-eopt: {error}\n")
        return 2
    finally:
        logging.disable(logging.NOTSET)
    return 0


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="megatron-eopt",
        description="See what an optimizer does before and after it runs.",
        epilog="megatron-eopt plan --model llama-3-8b --dp 256",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "what a step will send, hold and take at one layout"
    one = commands.add_parser("plan", help=text, description=f"Show {text}. {_HOW}")
    _add_common(one)
    for field, (short, flag, meaning) in SIZES.items():
        names = (f"--{short}", f"--{flag}")
        one.add_argument(*names, dest=field, type=int, metavar="N", help=meaning)
    one.set_defaults(run=_plan)
    text = "the same over layouts of as many ranks"
    many = commands.add_parser("sweep", help=text, description=f"Show {text}. {_HOW}")
    _add_common(many)
    many.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks in all")
    for short, _, meaning in (SIZES[field] for field in ("tensor", "pipeline", "expert")):
        many.add_argument(f"--{short}", type=int, nargs="+", default=[1], help=meaning)
    many.set_defaults(run=_sweep)
    text = "what a checkpoint holds, and where it loads"
    shown = commands.add_parser("explain", help=text, description=f"Show {text}.")
    shown.add_argument("checkpoint", type=Path, help="folder of a run, or of one iteration")
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.set_defaults(run=_explain)
    text = "Megatron's flags for a published model, or which models there are"
    made = commands.add_parser("recipe", help=text, description=f"Print {text}.")
    made.add_argument("name", nargs="?", type=str.lower, choices=NAMES, metavar="NAME")
    text = "print those of a small model of this kind, which a CPU trains in seconds"
    made.add_argument("--small", action="store_true", help=text)
    made.set_defaults(run=_recipe)
    return parser


_HOW = (
    "The real optimizer runs as the busiest rank, on tensors without data; seconds are predicted "
    "from the GPU's data sheet. The model is a recipe's (at its layout, if no size is given), "
    "Megatron's flags, or both: a flag changes the recipe."
)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=str.lower, choices=NAMES, help="a recipe's architecture")
    add_flags(parser)
    gpus = parser.add_argument_group("machine")
    gpus.add_argument("--gpu", choices=MACHINES, default="H100", help="whose data sheet to take")
    for name, (kind, text) in _NUMBERS.items():
        gpus.add_argument(f"--gpu-{name}", type=kind, metavar="X", help=text)
    text = "tokens of a global batch, for the time of a whole iteration"
    parser.add_argument("--tokens", type=int, default=2**22, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--optimizer", default="muon", help="as for the trainer")
    add_arguments(parser)


def _planner(arguments: argparse.Namespace) -> Callable[[Layout], Plan]:
    """Return what plans a layout, once the arguments are known to say what."""
    check_integer("--tokens", arguments.tokens)
    flags = vars(arguments)
    given = {name: value for name, value in flags.items() if value is not None}
    published = arguments.model and recipe(arguments.model)
    architecture = published.architecture(**given) if published else from_flags(given)
    numbers = {name: given[f"gpu_{name}"] for name in _NUMBERS if f"gpu_{name}" in given}
    machine = dataclasses.replace(MACHINES[arguments.gpu], **numbers)
    if not flags.get("use_distributed_optimizer", True):
        rule = "is not what is planned: sharded storage"
        way_out = "Leave it out of the file for a plan"
        raise ConfigurationError("use_distributed_optimizer", False, rule, way_out)
    # what a step does depends on no learning rate
    needed = {"lr": 1e-3, "bf16": True, "use_distributed_optimizer": True}
    config, _ = config_from_args(argparse.Namespace(**flags | needed))
    return lambda layout: plan(architecture, layout, machine, config, tokens=arguments.tokens)


def _plan(arguments: argparse.Namespace, console: Console) -> None:
    given = {field: size for field in SIZES if (size := vars(arguments)[field]) is not None}
    layout = Layout(**given) if given or not arguments.model else recipe(arguments.model).planned()
    found = _planner(arguments)(layout)
    if arguments.json:
        console.print_json(json.dumps(as_dict(found)))
    else:
        show_plan(found, arguments.gpu, console)


def _sweep(arguments: argparse.Namespace, console: Console) -> None:
    planned, found, errors = _planner(arguments), [], {}
    sizes = list(itertools.product(arguments.tp, arguments.pp, arguments.ep))
    for tp, pp, ep in tqdm(sizes, desc="layouts", disable=None):
        try:
            check_integer("--tp x --pp", tp * pp)
            if arguments.ranks % (tp * pp):
                rule = f"must be divided by tp x pp, here {tp} x {pp}"
                raise ConfigurationError("--ranks", arguments.ranks, rule, "Choose other sizes")
            found.append(planned(Layout(tp, pp, arguments.ranks // (tp * pp), ep)))
        except ConfigurationError as error:
            errors[f"tp {tp}, pp {pp}, ep {ep}"] = error
    if not found:
        raise next(iter(errors.values()))
    for layout, reason in errors.items():
        sys.stderr.write(f"left out: {layout}: {reason}\n")
    if arguments.json:
        console.print_json(json.dumps([as_dict(item) for item in found]))
    else:
        show_sweep(found, arguments.gpu, console)


def _recipe(arguments: argparse.Namespace, _: Console) -> None:
    if arguments.name is None:
        for name in NAMES:
            one = recipe(name)
            paper = one.sources["paper"]
            sys.stdout.write(f"{name:17}{one.title:18}{one.optimizer:31}{paper}\n")
    else:
        words = " ".join(recipe(arguments.name).words(small=arguments.small))
        sys.stdout.write(words.replace(" --", "\n--") + "\n")


def _explain(arguments: argparse.Namespace, console: Console) -> None:
    contents = explain(arguments.checkpoint)
    if arguments.json:
        console.print_json(json.dumps(dataclasses.asdict(contents)))
    else:
        show(contents, console)
