"""A launcher with faults, for torchrun: `program.py FAULTS.json ppo|sft|rm ARGUMENTS...`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.faults.faults import Fault, install
from tests.faults.runs import launch

if __name__ == "__main__":
    faults = [Fault(**entry) for entry in json.loads(Path(sys.argv[1]).read_text())]
    install(faults, int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    launch(sys.argv[2], sys.argv[3:])
