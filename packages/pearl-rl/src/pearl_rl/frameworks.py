"""The frameworks whose configurations `import` reads and `export` writes."""

from typing import Final

NAMES: Final = {"verl": "verl", "slime": "slime", "roll": "ROLL", "areal": "AReaL"}
"""Name on the command line → as they write themselves."""
