"""Variables that a translation keeps: they tune a run, and can do nothing else."""

from __future__ import annotations

import re

import pytest

from megalite.extras.translation.environment import KEPT, add_environment
from megalite.extras.translation.report import Report

HARMFUL = """
TORCH_LOGS TORCH_LOGS_OUT TORCH_LOGS_FORMAT TORCH_TRACE TORCH_SHOW_CPP_STACKTRACES TORCH_FR_DUMP_TEMP_FILE
TORCH_NCCL_DEBUG_INFO_TEMP_FILE TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_COMPILE_DEBUG TORCH_COMPILE_DEBUG_DIR
TORCH_HOME TORCH_EXTENSIONS_DIR TORCH_DEVICE_BACKEND_AUTOLOAD TORCHELASTIC_ERROR_FILE TORCHINDUCTOR_CACHE_DIR
TORCHINDUCTOR_CPP_WRAPPER PYTORCH_NVCC PYTORCH_KERNEL_CACHE_PATH PYTORCH_JIT NCCL_DEBUG_FILE NCCL_TOPO_FILE
NCCL_TOPO_DUMP_FILE NCCL_CONF_FILE NCCL_NET NCCL_NET_PLUGIN NCCL_TUNER_PLUGIN NCCL_PROFILER_PLUGIN
NCCL_RAS_ADDR LD_PRELOAD PYTHONPATH PATH
"""


@pytest.mark.parametrize("name", HARMFUL.split())
def test_what_writes_files_or_loads_code_is_not_kept(name: str) -> None:
    report = Report()
    add_environment({name: "x", "NCCL_IB_HCA": "mlx5"}, report)
    assert report.environment == {"NCCL_IB_HCA": "mlx5"}
    assert report.notes == [f"not kept: {name}; set what your machine needs of them yourself"]


def test_no_name_that_is_kept_tells_a_place() -> None:
    assert not [name for name in KEPT if re.search("FILE|PATH|DIR|PLUGIN|LOGS|TRACE|FORMAT|NVCC|PYTHON|^LD_", name)]
