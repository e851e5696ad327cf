import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_example_prints_what_the_readme_says() -> None:
    text = README.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (expected,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, str(README), "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == expected


def test_the_tables_name_what_exists() -> None:
    text = README.read_text()
    folder = README.parent / "src" / "pearl_state"
    invariants, modules = text.split("## What is where")
    source = (folder / "table.py").read_text()
    named = re.findall(r"^\| `(\w+)` \|", invariants, re.MULTILINE)
    assert named
    assert all(f"- `{name}`:" in source for name in named)
    cells = re.findall(r"^\| (`.*?`) \|", modules, re.MULTILINE)
    assert all((folder / f"{name}.py").exists() for cell in cells for name in re.findall(r"`(\w+)`", cell))
