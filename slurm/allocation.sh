# shellcheck shell=bash disable=SC2154 # the script that sources it has variables of its own
# What a training asks SLURM of its job: until when it runs, and that it begins again where its first node is lost.

# The job as scontrol names it: SLURM_JOB_ID alone may be the number of a whole array.
this_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
this_job=${this_job:-$SLURM_JOB_ID}

# about_job FIELD: what SLURM says of this job now; it is asked again for a minute where its controller does not answer
about_job() {
    local fields tries=0
    until fields=$(scontrol show job --oneliner "$this_job") || ((++tries > 12)); do sleep 5; done
    grep -oP "(?<= $1=)\S+" <<<"$fields"
}

# Tell programs when SLURM ends this job, in seconds since 1970: its time limit may have been changed since it began.
export_end_time() {
    local end
    end=$(about_job EndTime)
    unset SLURM_JOB_END_TIME
    case $end in
        *T*) SLURM_JOB_END_TIME=$(date -d "$end" +%s) && export SLURM_JOB_END_TIME ;; # else there is no limit
    esac
}

# Whether another attempt would soon have to stop.
is_near_its_end() {
    export_end_time
    [ -n "${SLURM_JOB_END_TIME:-}" ] && ((SLURM_JOB_END_TIME - $(date +%s) < 2 * STOP_SECONDS))
}

# Under --no-kill, which spares need, SLURM lets a job run on without its script when that one's node is lost: the last
# node sees to it that the job begins again.
guard() {
    local last
    last=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$last" --cpu-bind=none bash -c \
        "trap '' USR1; while sleep 20; do case \$(sinfo -hN -p $SLURM_JOB_PARTITION -n $SLURMD_NODENAME -o %t) in
            down*) scontrol requeue $this_job ;; esac; done" &
}
