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


def test_the_module_table_names_modules_that_exist() -> None:
    folder = README.parent / "src" / "pearl_executor"
    rows = re.findall(r"^\| (`.*?`) \|", README.read_text(), re.MULTILINE)
    names = [name for cell in rows for name in re.findall(r"`(\w+)`", cell)]
    assert names
    assert all((folder / f"{name}.py").exists() or (folder / name).is_dir() for name in names)
