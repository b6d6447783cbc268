"""All mounts at work at once in one folder, and what must hold after it (`tests.mount.shared.load`)."""

from __future__ import annotations

import shutil

from tests.mount.shared import load
from tests.mount.shared.ground import SharedMounts, wait_for_folder
from tests.mount.shared.worker import together
from tests.mount.tools import catch_up


def at_once(mounts: SharedMounts, seed: int, count: int) -> list[str]:
    """Have every worker do `count` steps of a seed at once; return what went wrong."""
    folders = [folder / f"at once {seed}" for folder in mounts.folders]
    folders[0].mkdir()
    load.prepare_mixed(folders[0])
    for folder in folders[1:]:
        wait_for_folder(folder)
        catch_up(folders[0], folder)
    names = [str(folder) for folder in folders]
    wrong = [
        f"rank {rank}, {what}"
        for rank, found in enumerate(together(mounts.workers, load.mixed, names, seed, count))
        for what in found
    ]
    done = together(mounts.workers, load.noted, names)
    try:
        for folder in folders[1:]:
            catch_up(folders[0], folder)
    except AssertionError as error:
        wrong.append(f"the mounts show different trees: {error}")
    for rank, folder in enumerate(folders):
        wrong += [f"on mount {rank}: {what}" for what in load.mixed_wrong(folder, done)]
    shutil.rmtree(folders[0], ignore_errors=True)
    return wrong
