"""Environment variables of a launch script that its translation keeps: all others could do more than tune a run."""

from __future__ import annotations

from collections.abc import Mapping

from megalite.extras.translation.report import Report

_KEPT = {
    "the devices and threads of a rank": "CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING "
    "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES OMP_NUM_THREADS",
    "the place of a rank": "LOCAL_RANK MASTER_ADDR MASTER_PORT RANK WORLD_SIZE",
    "the caching allocator, whose options are numbers and words": "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF "
    "PYTORCH_HIP_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING",
    "the network interfaces": "GLOO_SOCKET_FAMILY GLOO_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME",
    "NCCL's use of InfiniBand": "NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_AR_THRESHOLD NCCL_IB_CUDA_SUPPORT NCCL_IB_DISABLE "
    "NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_MERGE_NICS NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_PKEY "
    "NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT NCCL_IB_SL NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_TC NCCL_IB_TIMEOUT "
    "NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ",
    "NCCL's choice of ways": "NCCL_ALGO NCCL_BUFFSIZE NCCL_COLLNET_ENABLE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE "
    "NCCL_DMABUF_ENABLE NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER NCCL_LAUNCH_MODE NCCL_LL_THRESHOLD "
    "NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_MNNVL_ENABLE NCCL_NCHANNELS_PER_NET_PEER "
    "NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_P2P_NET_CHUNKSIZE "
    "NCCL_PROTO NCCL_PXN_DISABLE NCCL_SHM_DISABLE NCCL_SOCKET_NTHREADS NCCL_TREE_THRESHOLD NCCL_WORK_FIFO_DEPTH",
    "what NCCL prints, on the screen alone": "NCCL_DEBUG NCCL_DEBUG_SUBSYS",
    "errors and time limits of collectives": "NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT NCCL_TIMEOUT "
    "TORCH_DISTRIBUTED_DEBUG TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT "
    "TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC "
    "TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_NAN_CHECK TORCH_NCCL_RETHROW_CUDA_ERRORS TORCH_NCCL_USE_COMM_NONBLOCKING",
    "torchrun's store": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
}
"""Names by their reason. None names a file or a folder, loads code, or says where or in which form something is
written: TORCH_LOGS_OUT with TORCH_LOGS_FORMAT, for one, writes lines of the script's choice into any file."""

KEPT = frozenset(name for names in _KEPT.values() for name in names.split())


def add_environment(environment: Mapping[str, str], report: Report, unclear: Mapping[str, str] | None = None) -> None:
    """Add the variables of the list to a report, a need for each that is unclear, and a note on the others."""
    left = [name for name in environment if name not in KEPT]
    if left:
        report.notes.append(f"not kept: {', '.join(left)}; set what your machine needs of them yourself")
    for name, value in environment.items():
        if name in KEPT:
            if unclear and name in unclear:
                report.missing.append(unclear[name])
            else:
                report.environment[name] = value
