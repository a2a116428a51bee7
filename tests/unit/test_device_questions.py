"""Code asks `on_gpu` what runs on a device, since the meta device stands for another. Few places ask for its type."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "kernels/megalite_kernels/implementation.py": "answers for the meta device",
    "kernels/megalite_kernels/grouped.py": "asks the GPU at hand for its capability",
    "kernels/megalite_kernels/launch.py": "asks the GPU at hand for its multiprocessors",
    "kernels/megalite_kernels/measure.py": "times what runs here",
    "kernels/megalite_kernels/scaled_products.py": "asks the GPU at hand for its capability, and none for a plan",
    "kernels/megalite_kernels/permutation.py": "asks whether the host has the values at hand",
    "kernels/megalite_kernels/torch_internals.py": "asks torch which operator it takes here; all do the same work",
    "megalite/extras/doctor/consistency.py": "compares the devices at hand",
    "megalite/checkpoint/fetching.py": "reads into memory of the host",
    "megalite/modules/alike.py": "compares values on the device that has them",
    "megalite/modules/records.py": "moves tensors to the device of a run",
    "megalite/offload/transfers.py": "makes the engine that copies here, and none for the meta device",
    "megalite/parallel/deep_ep.py": "asks whether this process has DeepEP",
    "megalite/parallel/device.py": "is the module of devices",
    "megalite/parallel/randomness.py": "seeds no generator where nothing is drawn",
    "megalite/extras/planner/as_rank.py": "times what runs here",
    "megalite/extras/planner/calibration.py": "times what runs here",
    "megalite/tasks/module_task.py": "moves tensors to the device of a run",
    "megalite/extras/corruption/bit_hash.py": "sizes of what a core's cache or a whole GPU takes at once",
    "megalite/extras/corruption/watch.py": "asks whether kernels may add in another order the second time",
    "megalite/extras/recovery/copies.py": "times what runs here",
    "megalite/extras/synchronization/from_flags.py": "asks which messages the processes at hand can send",
}
"""Files that ask for the type of a device, and why the meta device cannot get a wrong answer there."""
_QUESTION = re.compile(r"\bdevice\.type\b|\.is_cuda\b|get_device_capability\(")


def test_the_type_of_a_device_is_asked_for_in_few_places() -> None:
    asking = {
        str(path.relative_to(ROOT))
        for folder in ("megalite", "kernels/megalite_kernels")
        for path in (ROOT / folder).rglob("*.py")
        if _QUESTION.search(path.read_text())
    }
    assert asking == ALLOWED.keys(), "ask megalite_kernels.implementation.on_gpu, or say here why not"
