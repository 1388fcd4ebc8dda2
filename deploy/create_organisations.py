"""Four organisations for deploy/compose.yaml: folders with keys, digits and a plan that all have joined.

python deploy/create_organisations.py organisations [--rounds 100]
"""

import argparse
from pathlib import Path

from pdsl.peer.demo import NAMES, create_organisations

PORT = 7443


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for one folder per organisation; must be empty or missing")
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    addresses = [f"{name}:{PORT}" for name in NAMES]  # a service's name is its host name in the network of Compose
    create_organisations(arguments.folder, addresses, arguments.rounds, print)


if __name__ == "__main__":
    main()
