"""Every microbenchmark, or those named.

python benchmarks/micro/run.py                    # real shapes, about two minutes
python benchmarks/micro/run.py --quick            # tiny shapes, seconds: proves that they run
python benchmarks/micro/run.py gemv attention --json out.json
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

from common import Result, grid

from larql_kv.backends.cpu.ops import stream_bandwidth
from larql_kv.bench.machine import OtherLoad, machine_facts
from larql_kv.bench.report import write_text

BENCHES = ("gemv", "attention", "gemm", "startup")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benches", nargs="*", metavar="BENCH", help=f"of {', '.join(BENCHES)}; default all")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for CI")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    arguments = parser.parse_args()
    unknown = set(arguments.benches) - set(BENCHES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))} (of {', '.join(BENCHES)})")
    others = OtherLoad()
    roof = stream_bandwidth(0.1 if arguments.quick else 1.0)
    results: list[Result] = []
    for name in arguments.benches or BENCHES:
        results += importlib.import_module(name).run(arguments.quick, roof)
    print(grid(results).plain())
    busy = others.cores()
    print(f"memory reads at {roof:.1f} GB/s; other processes kept {busy or 0:.1f} cores busy")
    if arguments.json:
        found = {
            "kind": "micro",
            "machine": machine_facts(),
            "bandwidth_gb_per_s": roof,
            "other_cores": busy,
            "results": [result.to_dict() for result in results],
        }
        write_text(arguments.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
