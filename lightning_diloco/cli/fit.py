"""One learner of a YAML recipe: `python -m lightning_diloco.cli.fit [--local N] RECIPE.yaml [overrides]`.

Exit code 2 means that a restart would not help: the configuration, the model or the secret is wrong, or the id is
taken.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lightning_diloco.cli.local.collector import kept
from lightning_diloco.cli.text.printable import printable
from lightning_diloco.errors import AuthError, ConfigError, FencedError, PlanMismatchError

_HERE = "--local"


def main() -> int:
    """Fit the recipe; returns the exit code."""
    with kept():
        from lightning_diloco.cli.fitting import Fit, cli_arguments
    # sys.argv is left unchanged, because Lightning starts the other ranks of a learner with it.
    words = sys.argv[1:]
    num_here, words = (int(words[1]), words[2:]) if words[0] == _HERE else (1, words)
    try:
        Fit(Path(words[0]), num_here, cli_arguments(words, os.environ))
    except (ConfigError, PlanMismatchError, AuthError, FencedError) as error:
        print(f"diloco: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
