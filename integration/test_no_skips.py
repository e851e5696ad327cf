"""A session in which tests are skipped does not pass where it must run them all."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = "import pytest\n\ndef test_it():\n    pytest.skip('the thing is missing')\n"
PASSES = "def test_it():\n    pass\n"


@pytest.mark.parametrize(("text", "no_skips", "code"), [(SKIPS, "1", 1), (SKIPS, "", 0), (PASSES, "1", 0)])
def test_a_skipped_test_fails_the_session_where_none_may_be(tmp_path, text, no_skips, code):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_it.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "PEARL_NO_SKIPS": no_skips},
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert ("the thing is missing" in done.stdout) == bool(code)
