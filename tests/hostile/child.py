"""The process in which cases run that may end it: a line of JSON for each CASE=WAY that it is given."""

from __future__ import annotations

import json
import sys

import torch

from tests.hostile.cases import CASES
from tests.hostile.governors import frozen_heap
from tests.hostile.harness import Judge


def main(pairs: list[str]) -> None:
    torch.set_num_threads(1)
    judge: Judge | None = None
    with frozen_heap():
        for pair in pairs:
            name, way = pair.split("=")
            if judge is None or judge.case.name != name:
                judge = None  # before the next one looks at what is alive
                judge = Judge(CASES[name])
            told = judge.outcome(way).as_json()
            print(json.dumps({"case": name, "way": way} | told), flush=True)  # noqa: T201  # what the parent reads


if __name__ == "__main__":
    main(sys.argv[1:])
