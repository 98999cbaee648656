"""Every flag line of the documentation is built and stepped once, or refused as its page says.

The trainer's parser, argument check and set-up of model and optimizer are the real ones; the model
is a GPT of one layer.
"""

import argparse
import contextlib
import importlib.util
import io
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.doc_commands import PAGES, ROOT
from tests.functional.doc_flags import REFUSED, FlagLine, flag_lines_of
from tests.harness import run_ranks
from tests.harness.scene import forget_megatron

BASE = """
    --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 6
    --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0 --attention-backend unfused
    --untie-embeddings-and-output-weights --save-interval 6
""".split()
AT_ONCE = 2
"""How many lines share a job; the threads of their process groups end with it."""


def _lines(pages: list[Path]) -> list[FlagLine]:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_eopt.arguments import add_arguments

    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser()))
    return [line for page in pages for line in flag_lines_of(page, parser)]


def _complete(flags: tuple[str, ...]) -> list[str]:
    """Return a command line with what every run needs and the flags do not say."""
    more = [] if any("-data-path" in flag for flag in flags) else ["--mock-data"]
    if "--optimizer-config" not in flags:
        more += ["--optimizer", "muon", "--lr", "1e-2"]
    return [*BASE, *more, *flags]


def _outcomes(lines: list[tuple[str, ...]]) -> list[str]:
    """Build and step each line; return what was raised, "" if nothing was."""
    from megatron_eopt import megatron_lm

    outcomes = []
    arguments, printed = sys.argv, io.StringIO()
    for flags in lines:
        sys.argv = ["script", *_complete(flags)]
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(printed),
                megatron_lm.installed(),
            ):
                _register_the_example()
                _step()
            outcomes.append("")
        except (Exception, SystemExit) as error:
            outcomes.append(f"{type(error).__name__}: {error} {printed.getvalue()[-500:]}")
        finally:
            sys.argv = arguments
            forget_megatron()
    return outcomes


def _step() -> None:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.training import arguments, training
    from megatron.training.global_vars import set_global_variables

    from megatron_eopt import megatron_lm
    from megatron_eopt.stores.dtensors import local_of
    from tests.harness.megatron import initialize_megatron
    from tests.harness.models import synthetic_batch, tiny_gpt, train_step

    args = arguments.parse_args(megatron_lm.add_arguments)
    arguments.validate_args(args)
    set_global_variables(args, build_tokenizer=False)
    initialize_megatron(args.tensor_model_parallel_size)

    def provider(**_: Any) -> torch.nn.Module:
        return tiny_gpt(
            layers=1, bf16=args.bf16, params_dtype=args.params_dtype, transformer_impl="local"
        )

    chunks, optimizer, scheduler = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder, provider
    )
    # beyond the warm-up, which begins with a learning rate of zero
    scheduler.step(args.global_batch_size * args.lr_warmup_iters)
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    before = [local_of(param).detach().clone() for param in optimizer.get_parameters()]
    train_step(chunks, optimizer, [synthetic_batch(0)])
    after = [local_of(param) for param in optimizer.get_parameters()]
    assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True)), "no step"


def _register_the_example() -> None:
    from megatron_eopt.settings.registry import is_registered

    if not is_registered("sign_per_matrix"):
        path = ROOT / "examples" / "my_optimizer.py"
        spec = importlib.util.spec_from_file_location("my_optimizer", path)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@cache
def lines_of(*pages: Path) -> list[FlagLine]:
    (found,) = run_ranks(1, _lines, list(pages), timeout=240)
    return found


KNOWN: dict[tuple[str, ...], str] = {}
"""Outcomes of lines so far; many stand on several pages."""


def problems(lines: list[FlagLine]) -> list[str]:
    """Return the lines that do not do what they should, with what they do."""
    for ranks in (1, 2):
        new = {line.all_flags for line in lines if line.ranks == ranks} - KNOWN.keys()
        waiting = sorted(new)
        while waiting:
            some, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            first = run_ranks(ranks, _outcomes, some, timeout=240)[0]
            KNOWN.update(zip(some, first, strict=True))
    found = []
    for line in lines:
        outcome, refusal = KNOWN[line.all_flags], line.refusal
        if (refusal not in outcome) if refusal else outcome:
            found.append(f"{line.place}: {outcome or f'trains, though {refusal!r}'}")
    return found


USUAL = ("README.md", "getting_started.md")
"""Pages whose lines the usual tests step."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[] if page.name in USUAL else pytest.mark.long)
        for page in PAGES
    ],
)
def test_flag_lines_of(page):
    lines = [line for line in lines_of(*PAGES) if line.page == page.name]
    wrong = problems(lines)
    assert not wrong, "\n".join(wrong)


def test_every_refusal_is_of_a_line():
    refusals = {line.refusal for line in lines_of(*PAGES)}
    assert refusals == {None, *REFUSED.values()}
