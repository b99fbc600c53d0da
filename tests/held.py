"""The command line, noting what each process holds of the model: `python -m tests.held FOLDER ARGUMENTS...`.

FOLDER/RANK: how many numbers of parameters and of optimizer state the process holds, and how many the model has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from locant.cli import app
from locant.training.resumable import ResumableTrainer


def held(tensors: list[Any]) -> int:
    """Numbers of which this process has memory."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)


def main(folder: str) -> None:
    """Runs the command line."""
    record = ResumableTrainer.record_step

    def noting(trainer: Any) -> None:
        record(trainer)
        parameters = list(trainer.model_wrapped.parameters())
        moments = [s for state in trainer.optimizer.state.values() for name, s in state.items() if name != "step"]
        found = [held(parameters), held(moments), sum(p.numel() for p in parameters)]
        (Path(folder) / str(trainer.args.process_index)).write_text(json.dumps(found))

    ResumableTrainer.record_step = noting
    app()


if __name__ == "__main__":
    where = sys.argv.pop(1)
    Path(where).mkdir(exist_ok=True)
    main(where)
