"""`python -m pearl_telemetry dictionary | dashboard`: metrics as Markdown, or as a Grafana dashboard in JSON."""

import argparse
import json
import sys
from collections.abc import Sequence

from pearl_telemetry.dashboard import grafana
from pearl_telemetry.dictionary import dictionary


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pearl_telemetry", description="Pages made from the metric names.")
    parser.add_argument("page", choices=("dictionary", "dashboard"), help="Markdown table, or Grafana JSON")
    page = parser.parse_args(argv).page
    print(dictionary() if page == "dictionary" else json.dumps(grafana(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
