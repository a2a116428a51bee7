"""How ranks meet before there is a process group: at a store, to whose address their launcher leads them."""

from __future__ import annotations

import datetime
import os
import time
from contextlib import suppress

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from megalite.errors import CommunicationError, ConfigurationError
from megalite.process.bounded import within
from megalite.process.place import Place, ranks_text

PATIENCE = 30.0
"""Seconds after which rank 0 says who has not come, and again after twice as many, and so on."""
STORE_HANGS = 20.0
"""Seconds that the store may take beyond a limit: torch has none for a store that stands still."""
_BETWEEN_LOOKS = 0.05
_CAME, _ALL = "came", "all have come"


def connect(place: Place, seconds: float, purpose: str) -> Store:
    """A connection of its own to the store of this start; one process alone has a store to itself.

    Args:
        seconds: for the address to answer, and later for a key to appear.
        purpose: sets its keys apart from those of others.

    Raises:
        ConfigurationError: no launcher has given an address.
        CommunicationError: nothing answers there.
    """
    if place.world_size == 1:
        return HashStore()
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except KeyError as error:
        raise ConfigurationError(f"{place.world_size} ranks must be started by torchrun: {error} is not set") from None
    except ValueError:
        raise ConfigurationError(f"MASTER_PORT={os.environ['MASTER_PORT']} is no port: start by torchrun") from None
    first = place.rank == 0 and not hosted_by_launcher()
    timeout = datetime.timedelta(seconds=seconds)

    def open_store() -> Store:
        return TCPStore(host, port, is_master=first, timeout=timeout, wait_for_workers=False, multi_tenant=True)

    try:
        store = within(seconds + STORE_HANGS, open_store)
    except TimeoutError:
        raise CommunicationError(f"{store_name()} does not answer: the process that has it is stopped") from None
    except RuntimeError as error:
        raise CommunicationError(f"{store_name()} cannot be reached: {str(error).splitlines()[0]}") from error
    return PrefixStore(f"{purpose}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def hosted_by_launcher() -> bool:
    """Whether the launcher has the store, and not rank 0; torch asks the same."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_name() -> str:
    """For messages."""
    return f"the store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (MASTER_ADDR, MASTER_PORT)"


def meet(store: Store, place: Place, seconds: float) -> None:
    """Return once rank 0 has seen all ranks. Raises CommunicationError where that is not so within `seconds`."""

    def wait() -> None:
        store.set(f"{_CAME}/{place.rank}", "")
        store.add(_CAME, 1)
        if place.rank == 0:
            _wait_for_all(store, place.world_size, seconds)
            store.set(_ALL, "")
        else:
            store.wait([_ALL], datetime.timedelta(seconds=2 * patience))  # else torch prints that its time is up

    patience = seconds + STORE_HANGS
    try:
        within(patience, wait)
    except TimeoutError:
        problem = f"says nothing for {patience:.0f} s: rank 0, or the process that has it, is stopped"
        raise CommunicationError(f"{store_name()} {problem}") from None
    except RuntimeError as error:
        problem = f"does not answer any more: {str(error).splitlines()[0]}"
        raise CommunicationError(f"{store_name()} {problem}") from error


def _wait_for_all(store: Store, world_size: int, seconds: float) -> None:
    began, patience = time.monotonic(), PATIENCE
    while store.add(_CAME, 0) < world_size:
        waited = time.monotonic() - began
        if waited > min(seconds, patience):
            missing = [rank for rank in range(world_size) if not store.check([f"{_CAME}/{rank}"])]
            if waited > seconds:
                raise CommunicationError(
                    f"{ranks_text(missing)} did not come within {seconds:.0f} s (--distributed-timeout-minutes) to "
                    f"{store_name()}: never started, stopped, ended, or without a way there"
                )
            with suppress(OSError):  # nobody reads the output any more
                print(f"waiting for {ranks_text(missing)} of {world_size}, for {waited:.0f} s by now", flush=True)
            patience *= 2
        time.sleep(_BETWEEN_LOOKS)
