"""The page of configuration errors is what the source says."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "error_table.py"


def test_the_page_is_up_to_date():
    """If this fails, run the script."""
    assert subprocess.run([sys.executable, SCRIPT, "--check"], check=False).returncode == 0
