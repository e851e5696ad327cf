"""The README's examples do what they say."""

import re
import tomllib
from pathlib import Path

import pytest

from pearl_rl.settings import load_settings

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_the_python_examples_run(code):
    exec(compile(code, str(README), "exec"), {})


def test_the_configuration_example_is_valid(tmp_path):
    (text,) = blocks("toml")
    path = tmp_path / "job.toml"
    path.write_text(text)
    resolved = load_settings(path)
    example = tomllib.loads(text)
    assert resolved.settings.cluster.reserved_rollout_gpus == example["cluster"]["reserved_rollout_gpus"]
