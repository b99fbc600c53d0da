"""What the processes of one run agree on before a step is made: the recipe, the folder, the checkpoint. All call it."""

from __future__ import annotations

import socket
import time
import uuid
from pathlib import Path
from typing import IO, Any

from accelerate.utils import broadcast_object_list, gather_object

from locant.training import checkpoints, launch
from locant.training.folder import claim_folder, differences, unwritable

PATIENCE = 10.0  # seconds in which a network file system must show what another machine wrote


def claim_together(path: Path, recipe: dict[str, Any], state: Any, command: str) -> IO[str] | None:
    """Makes and locks the folder of a run, whose recipe every process has read for itself; the lock is the first one's.

    Raises: ValueError as `claim_folder` does, and in all processes where one of them has another recipe (or text, model
    or data: their digests are in it) or does not see the folder; OSError where the folder cannot be written.
    """
    if state.num_processes == 1:
        return claim_folder(path, recipe, command)
    hosts, recipes = zip(*gather_object([(socket.gethostname(), recipe)]), strict=True)
    for number, (host, theirs) in enumerate(zip(hosts, recipes, strict=True)):
        if changed := differences(theirs, recipes[0]):
            raise ValueError(
                f"{command}: process {number} ({host}) is at another run than process 0 ({hosts[0]}): "
                f"{'; '.join(changed[:4])}; give all machines the same recipe, files and versions"
            )
    lock = claim_folder(path, recipe, command) if state.is_main_process else None
    try:
        _see_one_folder(path, hosts, state, command)
    except BaseException:
        if lock is not None:
            lock.close()
        raise
    return lock


def _see_one_folder(path: Path, hosts: tuple[str, ...], state: Any, command: str) -> None:
    """Raises: ValueError in all processes where one does not see what the first writes; OSError where it cannot."""
    told = [uuid.uuid4().hex, str(path.absolute())]
    broadcast_object_list(told)
    token, first = told
    mark = path / f".seen-{token}"
    if state.is_main_process:
        try:
            mark.touch()
        except OSError as error:
            raise unwritable(path, error, command) from error
    state.wait_for_everyone()
    until = time.monotonic() + PATIENCE
    while not (seen := mark.exists()) and time.monotonic() < until:
        time.sleep(0.1)
    sights = zip(hosts, gather_object([seen]), strict=True)
    blind = [f"{number} ({host})" for number, (host, sees) in enumerate(sights) if not sees]
    if state.is_main_process:
        mark.unlink(missing_ok=True)
    if blind:
        raise ValueError(
            f"{command}: {first!r} of process 0 ({hosts[0]}) is not seen by process {', '.join(blind)}, "
            "needed by all to go on after a stop; give an --out on a file system that the machines share"
        )


def take_up(folder: Path, recipe: dict[str, Any], state: Any, command: str) -> tuple[Path | None, list[str]]:
    """The checkpoint that a run goes on from, None to begin, and what is wrong with newer ones. All processes call it.

    Raises: ValueError for a checkpoint of another recipe or another kind of launch; OSError where the folder cannot be
    written.
    """
    main = state.is_main_process
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint, broken = checkpoints.last_good(folder, recipe, command) if main else (None, [])
    except OSError as error:
        raise unwritable(folder, error, command) from error
    state.wait_for_everyone()
    if not main:
        checkpoint, _ = checkpoints.last_good(folder, recipe, command)
    if checkpoint is not None:
        launch.check_checkpoint(checkpoint, command)
    state.wait_for_everyone()
    return checkpoint, broken
