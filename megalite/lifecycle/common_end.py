"""Agreement of all ranks that the program ends on each of them, before they save together at its end.

The collectives of a rank whose program ends would meet those of the others' next step, and mix their bytes. So the
ranks agree by the store of the process group. One rank decides for all, so that none saves alone.
"""

from __future__ import annotations

import secrets

import torch.distributed as dist

from megalite import torch_internals
from megalite.errors import EXIT_INTERNAL, CommunicationError, MegaliteError
from megalite.mailbox import Mailbox
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.mesh import ParallelMesh

WAIT_SECONDS = 10.0
"""Number of seconds for which a rank whose program ends waits for the others."""
_ALL, _SOME = "all", "some"


class EndedAlone(MegaliteError):
    """The program ended on some ranks, while it goes on on others."""

    exit_code = EXIT_INTERNAL


class CommonEnd:
    """End of a program on all ranks of a run. Created by all ranks together."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._ranks = mesh.world_size
        # A name of this run's own: a program may start one run after the other in the same processes.
        self._name = f"megalite/end/{all_gather_json(secrets.token_hex(8), mesh)[0]}/"

    def require(self, iteration: int) -> None:
        """Wait until the program ends on all ranks. Raises EndedAlone if it goes on on some. `iteration`: last step."""
        if self._ranks == 1 or not dist.is_initialized():  # the program may have destroyed the group
            return
        try:
            mailbox = Mailbox(torch_internals.default_store(), self._ranks, prefix=self._name)
            if mailbox.add("ended", 1) == self._ranks:
                mailbox.put("all ended", "")
            all_ended = mailbox.wait(["all ended"], WAIT_SECONDS)
            decision = mailbox.first("decision", _ALL if all_ended else _SOME)
        except CommunicationError:  # the store is gone or hangs
            decision = _SOME
        if decision != _ALL:
            raise EndedAlone(
                f"the program ended on this rank after step {iteration}, before it ended on the others: steps "
                f"that no checkpoint has are lost. End it on all ranks within {WAIT_SECONDS:.0f} s, or call "
                "run.close() on all before that"
            )
