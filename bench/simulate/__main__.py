"""`python -m bench.simulate [--only PART]`: a lake of 48 to 96 machines of 32 devices, as far as it can be known here.

The tables, the walker's and the head's decisions are the product's; disks and links are modelled, with the sources of
their figures in `bench.simulate.hardware`; memory of connections and the CPU of requests are measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Final

from bench.harness.machine import machine
from bench.harness.process import ROOT
from bench.simulate import balance, heads, keys, names, reads, rebuild
from bench.simulate.hardware import SHAPES
from bench.simulate.measured import Measured, measure

_WIDE: Final = SHAPES[:2]


@cache
def _measured() -> Measured:
    return measure()


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "balance": lambda: balance.report(SHAPES),
    "rebuild": lambda: rebuild.report(_WIDE),
    "bandwidth": lambda: reads.bandwidth(_WIDE),
    "tails": lambda: reads.tails(_WIDE[1:]),
    "heads": lambda: heads.report(_WIDE, _measured()),
    "hits": lambda: keys.hits(_WIDE),
    "names": names.report,
    "matches": lambda: keys.matches(_WIDE, _measured().price),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description="A lake of many machines.")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="one of the tables")
    options = parser.parse_args(arguments)
    facts = machine(ROOT)
    print(f"{facts['kind']}; {facts['date']}, commit {facts['commit']}, load before {facts['load']}", flush=True)
    for name in options.only or PARTS:
        print(f"\n{name}\n\n{PARTS[name]()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
