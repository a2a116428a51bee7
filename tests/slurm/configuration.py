"""The files of a cluster, but for what differs: slurm.conf without its nodes, and the prolog."""

from __future__ import annotations

CONFIGURATION = """
ClusterName=megalite
SlurmctldHost={controller}({address})
SlurmctldPort={controller_port}
SlurmdPort={node_port}
# So that jobs of clusters on one address take different ports.
FirstJobId={first_job}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is requeued waits until its old credentials have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/{tracking}
TaskPlugin=task/{task}
# Two GPUs a node, for want of which there are two devices that every machine has.
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core{memory}
# Nodes may declare more processors than the machine has.
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdSpoolDir={folder}/%n/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_interval=1,nohold_on_prolog_fail
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobRequeue=1
KillWait=5
MinJobAge=3600
SlurmctldTimeout=30
SlurmdTimeout={notice}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
Prolog={folder}/prolog
PrologFlags=Alloc
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""

GPUS = """
NodeName={nodes} Name=gpu File=/dev/null
NodeName={nodes} Name=gpu File=/dev/zero
"""

PROLOG = """#!/bin/sh
# Runs on a node before a job does. Its failure drains the node and sends the job elsewhere.
test ! -e {folder}/"$SLURMD_NODENAME"/sick
"""
