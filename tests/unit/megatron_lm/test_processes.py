"""The process that the first save starts imports neither the training script nor torch."""

import contextlib
import pickle
import queue
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron_eopt import megatron_lm
from tests.harness import run_ranks

RESULT = WriteResult(MetadataIndex("weight"), 8, "place")


def _pass_on(results: Any) -> None:
    results.put({0: [RESULT]})
    assert not results.empty()
    assert results.get_nowait() == {0: [RESULT]}
    with pytest.raises(queue.Empty):
        results.get_nowait()


def _what_its_process_imports(folder: str, ours: bool) -> tuple[list[str], bool]:
    """Start the queue's process as the first save does, and pass a result through it.

    Returns:
        As what the script was imported, and whether the process has loaded torch.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    script, imports = Path(folder) / "script.py", Path(folder) / "imports"
    script.write_text(f"open({str(imports)!r}, 'a').write(__name__)\n")
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(script)
    filesystem_async._results_queue = None
    # the worker that runs this has it wrapped already
    wrapped = filesystem_async.get_write_results_queue
    filesystem_async.get_write_results_queue = wrapped.__wrapped__
    try:
        with megatron_lm.installed() if ours else contextlib.nullcontext():
            _pass_on(filesystem_async.get_write_results_queue())
            if ours:
                _pass_on(pickle.loads(pickle.dumps(filesystem_async.get_write_results_queue())))
        assert sys.modules["__main__"] is main
        pid = filesystem_async._results_queue._manager._process.pid
        loaded = Path(f"/proc/{pid}/maps").read_text()
    finally:
        filesystem_async._results_queue = None
        filesystem_async.get_write_results_queue = wrapped
    names = imports.read_text().split() if imports.exists() else []
    return names, "libtorch" in loaded


def test_neither_the_script_nor_torch(tmp_path: Path) -> None:
    (found,) = run_ranks(1, _what_its_process_imports, str(tmp_path), True)
    assert found == ([], False)


def test_without_us_both(tmp_path: Path) -> None:
    (found,) = run_ranks(1, _what_its_process_imports, str(tmp_path), False)
    assert found == (["__mp_main__"], True)
