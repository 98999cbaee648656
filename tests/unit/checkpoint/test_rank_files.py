"""Files that each rank writes for itself."""

import os
from pathlib import Path

import pytest
import torch

from megatron_eopt import ConfigurationError
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, build, steps
from tests.unit.storage.runs import DENSE


def saved_twice(folder: str) -> bool:
    """Return whether the second save has left the first one's file as it was, by another name."""
    case = Case("muon", {**DENSE, "layers": 1})
    chunk, optimizer = build(case)
    path, other = Path(folder, "state.pt"), Path(folder, "other.pt")
    steps(case, chunk, optimizer, 0, 1)
    optimizer.save_state_dict_to_file(str(path))
    before = path.read_bytes()
    os.link(path, other)
    steps(case, chunk, optimizer, 1, 2)
    optimizer.save_state_dict_to_file(str(path))
    assert path.read_bytes() != before
    return other.read_bytes() == before


def test_a_save_puts_a_new_file_in_the_place_of_the_old_one(tmp_path):
    """Whoever reads or kills it meanwhile has a whole file."""
    assert run_ranks(1, saved_twice, str(tmp_path)) == [True]


def with_more(folder: str) -> None:
    """Load a file that also has a piece of another layout."""
    case = Case("muon", {**DENSE, "layers": 1})
    chunk, optimizer = build(case)
    path = Path(folder, "state.pt")
    steps(case, chunk, optimizer, 0, 1)
    optimizer.save_state_dict_to_file(str(path))
    content = torch.load(path, weights_only=True)
    name = min(name for name in content["pieces"] if " (" in name)
    content["pieces"][f"{name.partition(' (')[0]} (1, 1) from (0, 0)"] = torch.zeros(1)
    torch.save(content, path)
    with pytest.raises(ConfigurationError, match="has state that this rank does not need"):
        optimizer.load_state_dict_from_file(str(path))


def test_a_file_with_pieces_of_another_layout_is_refused(tmp_path):
    run_ranks(1, with_more, str(tmp_path))
