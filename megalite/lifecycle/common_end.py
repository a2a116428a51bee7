"""Agreement of all ranks that the program ends on each of them, before they save together at its end.

The collectives of a rank whose program ends would meet those of the others' next step, and mix their bytes. So the
ranks agree by the store of the process group. One rank decides for all, so that none saves alone.
"""

from __future__ import annotations

import secrets
import time
from functools import partial

import torch.distributed as dist

from megalite import torch_internals
from megalite.errors import EXIT_INTERNAL, MegaliteError
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh
from megalite.process.bounded import within
from megalite.torch_internals import Store

WAIT_SECONDS = 10.0
"""Number of seconds for which a rank whose program ends waits for the others."""
_POLL_SECONDS = 0.1
_STORE_SECONDS = 5.0  # time limit for the answers of the store
_ALL, _SOME = "all", "some"


class EndedAlone(MegaliteError):
    """The program ended on some ranks, while it goes on on others."""

    exit_code = EXIT_INTERNAL


class CommonEnd:
    """End of a program on all ranks of a run. Created by all ranks together."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._ranks = mesh.world_size
        # A name of this run's own: a program may start one run after the other in the same processes.
        self._name = f"megalite/end/{all_gather_json(secrets.token_hex(8), mesh)[0]}"

    def require(self, iteration: int) -> None:
        """Wait until the program ends on all ranks. Raises EndedAlone if it goes on on some. `iteration`: last step."""
        if self._ranks == 1 or not dist.is_initialized():  # the program may have destroyed the group
            return
        try:
            decision = within(WAIT_SECONDS + _STORE_SECONDS, partial(self._decide, torch_internals.default_store()))
        except (RuntimeError, TimeoutError):  # the store is gone or hangs
            decision = _SOME
        if decision != _ALL:
            raise EndedAlone(
                f"the program ended on this rank after step {iteration}, before it ended on the others: steps "
                f"that no checkpoint has are lost. End it on all ranks within {WAIT_SECONDS:.0f} s, or call "
                "run.close() on all before that"
            )

    def _decide(self, store: Store) -> str:
        ended, deadline = f"{self._name}/ranks", time.monotonic() + WAIT_SECONDS
        number = store.add(ended, 1)
        while number < self._ranks and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            number = store.add(ended, 0)
        decision = _ALL if number == self._ranks else _SOME
        return store.compare_set(f"{self._name}/decision", "", decision).decode()
