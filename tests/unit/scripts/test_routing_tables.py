import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_docs_routing_md_is_what_the_code_makes():
    command = [sys.executable, str(ROOT / "scripts" / "routing_tables.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
