"""``--import`` makes an optimizer of a file known before flags are read."""

from pathlib import Path

import pytest

from benchmarks.compare_optimizers.__main__ import checked
from benchmarks.compare_optimizers.__main__ import parser as of_comparison
from megatron_eopt import ConfigurationError
from tests.harness import run_ranks
from tests.unit.arguments.test_arguments import parser

EXAMPLE = str(Path(__file__).resolve().parents[3] / "examples" / "my_optimizer.py")


def _parsed(flags: list[str], folder: str) -> tuple[str, list[str]]:
    args = parser().parse_args(flags)
    own = ["--optimizers", args.optimizer, "--import", EXAMPLE, "--out", folder]
    arguments, rest = of_comparison().parse_known_args(own)
    _, settings = checked(arguments, rest)
    return args.optimizer, list(settings.flags)


# in another process, because an optimizer stays registered
@pytest.mark.parametrize("first", ["--import", "--optimizer"])
def test_the_optimizer_of_a_file_can_be_chosen(first, tmp_path):
    flags = {"--import": EXAMPLE, "--optimizer": "sign_per_matrix"}
    flags = {first: flags.pop(first), **flags}
    given = [text for pair in flags.items() for text in pair]
    name, of_trainer = run_ranks(1, _parsed, given, str(tmp_path))[0]
    assert (name, of_trainer) == ("sign_per_matrix", ["--import", EXAMPLE])


@pytest.mark.parametrize(
    ("name", "rule"), [("absent.py", "must be an existing Python file"), ("json.py", "json exists")]
)
def test_a_file_that_cannot_be_imported_is_refused(tmp_path, name, rule):
    file = tmp_path / name
    if "absent" not in name:
        file.write_text("")
    with pytest.raises(ConfigurationError, match=rule):
        parser().parse_args(["--import", str(file)])
