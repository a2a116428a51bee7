"""Reading of launch scripts: the training command that a shell would run, and what only a shell could tell."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megalite.errors import ConfigurationError
from megalite.extras.translation.script import read_script
from megalite.extras.translation.shell import Script

TRAIN = "\ntorchrun pretrain_gpt.py --num-layers 2 "


def argv(text: str, **variables: str) -> list[str]:
    """Return the arguments after `--num-layers 2` of a script that ends with the training command."""
    return list(read_script(text, variables).argv[2:])


def test_a_script_as_people_write_it() -> None:
    launch = read_script(
        """#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8 # of a node
SAVE=${1:-"runs/it's mine"}
DATA=$2
OPTIONS=" --lr 1e-4 \\
    --bf16 "
MODEL=(
    --num-layers $((4*GPUS))   # layers
    --hidden-size 64
    "--split '99,1,0'"
)
MODEL+=(--swiglu)
mkdir -p "$(dirname "$SAVE")" && echo "saves to $SAVE"
srun -l torchrun --nproc_per_node $GPUS --nnodes=$SLURM_NNODES \\
    --master_addr $MASTER_ADDR pretrain_gpt.py "${MODEL[@]}" ${OPTIONS} --save "$SAVE" --data-path $DATA 2>&1 | tee log
"""
    )
    assert launch.program == "pretrain_gpt.py"
    expected = ["--num-layers", "32", "--hidden-size", "64"]
    expected += [
        "--split '99,1,0'",
        "--swiglu",
        "--lr",
        "1e-4",
        "--bf16",
        "--save",
        "runs/it's mine",
        "--data-path",
        "$2",
    ]
    assert list(launch.argv) == expected
    assert launch.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert (launch.nodes, launch.processes_per_node, launch.world_size) == (4, 8, 32)
    assert launch.problems == ("line 6: --data-path needs $2, which the script does not set: give --set DATA=VALUE",)
    assert launch.launcher[:3] == ("srun", "-l", "torchrun")
    assert "$SLURM_NNODES" in " ".join(launch.launcher)


@pytest.mark.parametrize("variables", [{"DATA": "/a b"}, {"1": "/a b"}])
def test_what_the_script_does_not_set_can_be_given(variables: dict[str, str]) -> None:
    launch = read_script('DATA="$1"' + TRAIN + '--data-path "$DATA"', variables)
    assert launch.argv[2:] == ("--data-path", "/a b")
    assert launch.problems == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("X=$(date)", "line 1: --save needs $(date): give --set X=VALUE"),
        ("X=`date`", "line 1: --save needs `date`: give --set X=VALUE"),
        ("X=<a path>", "line 1: --save needs <a path>: give --set X=VALUE"),
        ("X=1\nif [ -f x ]; then X=2; fi", "line 2: --save needs $X, which depends on line 2: give --set X=VALUE"),
        (
            'X=1\nif [ -f "$NOT_SET" ]; then X=2; fi',
            "line 2: --save needs $X, which depends on line 2: give --set X=VALUE",
        ),
        ("X=1\n[ -d y ] && X=2", "line 2: --save needs $X, which depends on line 2: give --set X=VALUE"),
        ("X=1\nfor X in a b; do\n:\ndone", "line 2: --save needs $X, which depends on line 2: give --set X=VALUE"),
        ("X=1\nL[5]=$((Y=X=4))", "line 2: --save needs $X, which depends on line 2: give --set X=VALUE"),
        ("X=1\nL[X=2]=a", "line 2: --save needs $X, which depends on line 2: give --set X=VALUE"),
        ("X=1\nread X", "line 2: --save needs $X, which depends on line 2: give --set X=VALUE"),
        ("X=${Y%.*}", "line 1: --save needs ${Y%.*}: give --set X=VALUE"),
        ("X=$((2**3))", "line 1: --save needs $((2**3)): give --set X=VALUE"),
        ("X=$((2#101))", "line 1: --save needs $((2#101)): give --set X=VALUE"),
        (
            "X=0\nfor ((X=1; X<3; X++)); do\n:\ndone",
            "line 2: --save needs $X, which depends on line 2: give --set X=VALUE",
        ),
        ("X={a,b}", "line 1: --save needs {a,b}: give --set X=VALUE"),
        ("X=1\nsource conf.sh", "line 2: --save needs $X, which depends on line 2: give --set X=VALUE"),
        (". conf.sh\nX=${X:-2}", "line 2: --save needs $X: give --set X=VALUE"),
    ],
)
def test_what_only_a_shell_can_tell_is_told_with_its_line(text: str, problem: str) -> None:
    launch = read_script(text + TRAIN + '--save "$X"')
    assert launch.problems == (problem,)
    assert read_script(text + TRAIN + '--save "$X"', {"X": "here"}).argv[-1] == "here"


def test_a_command_in_a_loop_needs_what_the_loop_changes() -> None:
    launch = read_script(f"X=1\nfor y in a b; do {TRAIN.strip()} --seed $X; X=2; done")
    assert launch.problems == ("line 2: --seed needs $X, which depends on line 2: give --set X=VALUE",)
    assert launch.notes == ()


def test_a_placeholder_among_flags_is_written_into_the_script() -> None:
    launch = read_script('OPTIONS="--save <a path> --lr 1"' + TRAIN + "$OPTIONS")
    assert launch.problems == ("line 1: --save needs <a path>: write its value into the script",)


def test_what_reaches_no_flag_is_no_problem() -> None:
    launch = read_script("NOW=$(date)\nfor x in 1 2; do echo $x; done\n" + TRAIN + "--lr 1 > log_$NOW")
    assert launch.problems == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('D=fp8\nif [[ "$D" == "fp8" ]]; then A=1; else A=2; fi', "1"),
        ('D=x\nif [ "$D" = fp8 ]; then A=1; elif [ $D = x ]; then A=2; else A=3; fi', "2"),
        ('A=1\nif [ -n "$NOT_SET" ]; then A=2; fi', "1"),
        ("A=1\nif [ -z $NOT_SET ] && [ 3 -gt 2 ]; then A=2; fi", "2"),
        ("A=1\nif [[ $NOT_SET -eq 0 ]]; then A=2; fi", "2"),
        ("A=1\nif [ $NOT_SET -eq 0 ]; then A=2; fi", "1"),
        ("A=1\nif [ -n $NOT_SET ]; then A=2; fi", "2"),
        ("A=1\nif [ $NOT_SET = a ]; then A=2; fi", "1"),
        ("A=1\nif ! [[ a != b || 1 -eq 2 ]]; then A=2; fi", "1"),
        ("D=large-7b\ncase $D in small*) A=1 ;; large-*|huge) A=2 ;; *) A=3 ;; esac", "2"),
        ("f() { A=$1; }\nf 7", "7"),
        ("A=1\nwhile [[ $# -gt 0 ]]; do A=2; shift; done", "1"),
        ("[ 1 = 1 ] && A=5 || A=6", "5"),
        ("[ 1 = 2 ] && A=5 || A=6", "6"),
        ("A=${NOT_SET:-${ALSO_NOT:-4}}", "4"),
        ("B=2; A=${B:+3}", "3"),
        ("A=${B:=3}", "3"),
        ("L=(a b c); A=${#L[@]}${L[1]}", "3b"),
        ("A=$(( (7 - 2) * 3 / -2 % 4 ))", "-3"),
        ("x=abc; A=${#x}", "3"),
        ("declare -r A=9", "9"),
        ("A=1; f() { local A=2; B=3; }\nf; A=$A$B", "13"),
        ("A=1; (A=2)", "1"),
        ("L=(a b); L+=c; A=${L[0]}${L[1]}", "acb"),
        ("B=3; A=$B/a_$B/b", "3/a_3/b"),
        ('A=1\nif [[ abc == *"b"* ]]; then A=2; fi', "2"),
        ('A=1\nif [[ abc == "*b*" ]]; then A=2; fi', "1"),
        ("A=1; unset A; A=${A:-2}", "2"),
        ("case $NOT_SET in x) A=1 ;; *) A=2 ;; esac", "2"),
        ("A=1; source venv/bin/activate", "1"),
        ("A=1; source conf.sh; A=2", "2"),
        ("cat <<EOF\nA=0\nEOF\nA=1", "1"),
    ],
)
def test_conditions_and_expansions_that_need_no_shell_are_followed(text: str, expected: str) -> None:
    launch = read_script(text + TRAIN + "--seed $A")
    assert (launch.argv[-1], launch.problems) == (expected, ())


def test_scripts_within_scripts_are_followed() -> None:
    line = "torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers $N"
    assert read_script(f'N=4\nsrun -N 3 bash -c "cd x; {line}"').argv == ("--num-layers", "4")
    assert read_script(f"N=4\nCMD='{line}'\neval $CMD").argv == ("--num-layers", "4")
    assert read_script(f"export N=4\nbash -c '{line}'").argv == ("--num-layers", "4")
    assert read_script(f"N=4\nbash -c '{line}'").problems != ()
    job = read_script(f"N=4\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=5\nsrun {line}\nEOF\n")
    assert (job.argv, job.nodes, job.processes_per_node) == (("--num-layers", "4"), 5, 2)


@pytest.mark.parametrize(
    ("launcher", "places"),
    [
        ("torchrun --nnodes 2 --nproc-per-node=4", (2, 4)),
        ("torchrun --nnodes=1:3 --nproc_per_node 4", (3, 4)),
        ("python -m torch.distributed.launch --nproc_per_node 8", (None, 8)),
        ("python3.11 -m torch.distributed.run --nproc_per_node 8", (None, 8)),
        ("srun -N2 -n 16 python -u", (2, 8)),
        ("srun --nodes=2 --ntasks-per-node=8", (2, 8)),
        ("deepspeed --num_nodes 2 --num_gpus 8", (2, 8)),
        ("accelerate launch --num_machines 2 --num_processes 16", (2, 8)),
        ("mpirun -np 4 python", (None, 4)),
        ("mpirun -np 8 -N 4 python", (None, 4)),
        ("torchrun", (None, 1)),
        ("numactl -N 3 torchrun --nproc_per_node=2", (None, 2)),
        ("#SBATCH --nodes=2 --ntasks-per-node=1\nsrun accelerate launch --num_machines 2 --num_processes 16", (2, 8)),
        ("#SBATCH --nodes=2 --ntasks-per-node=8\nsrun python", (2, 8)),
        ("#SBATCH --nodes=2 --ntasks-per-node=8\npython", (None, None)),
        ("accelerate launch --num_machines 2 --num_processes 15", (2, None)),
        ("torchrun --nnodes $N --nproc-per-node 2", (None, None)),
        ("deepspeed --hostfile hosts --num_gpus 8", (None, None)),
        ("python", (None, None)),
    ],
)
def test_nodes_and_processes_of_each_launcher(launcher: str, places: tuple[int | None, int | None]) -> None:
    launch = read_script(f"{launcher} pretrain_gpt.py --num-layers 2")
    assert (launch.nodes, launch.processes_per_node) == places


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "starts a training program"),
        ("echo torchrun pretrain_gpt.py --num-layers 2", "starts a training program"),
        ("python tools/preprocess_data.py --input x", "starts a training program"),
        ("A='torchrun train.py'\nsource conf.sh\n$A", "line 2: source conf.sh is not read; --set gives"),
        ("echo 'open", 'line 1: not a shell script from " \'open" on'),
        ('\necho "open', "line 2: not a shell script from"),
        ("A=$(open", "line 1: not a shell script"),
        ("A=(open", "line 1: not a shell script"),
        ("if true; then\n:", "line 1: not a shell script from 'if true"),
        ("cat <<EOF\nopen", "line 1: not a shell script from '<<EOF"),
        ("\0", "characters that no shell script has"),
        ("{ :; " * 200 + "}; " * 200, "nested deeper than"),
        ("A=" + "${A:-" * 200 + "}" * 200, "nested deeper than"),
        ("A=xxxxxxxx\n" + "A=$A$A\n" * 40, "too large to follow"),
        ("X='eval $X'\neval $X", "shells within each other"),
        ("f() { g; g; }\ng() { f; f; }\nf", "line 2: more than 20 calls within each other"),
        (
            "f1() { :; }\n" + "".join(f"f{at + 1}() {{ f{at}; f{at}; }}\n" for at in range(1, 16)) + "f16",
            "too many to follow",
        ),
        ("x" * 300_000, "too large for a launch script"),
    ],
)
def test_what_is_no_launch_script_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_script(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("A=1\nf() { [ -f x ] && return; A=2; }\nf", 2),
        ("A=1\nf() { if [ -f x ]; then return; fi; A=2; }\nf", 2),
        ("A=1\nf() { if [ -f x ]; then if [ 1 = 1 ]; then return; fi; fi; A=2; }\nf", 2),
        ("A=1\nf() { for x in 1; do if [ -f x ]; then return; fi; done; A=2; }\nf", 2),
        ("A=1\nf() { case $(x) in x) return ;; esac; A=2; }\nf", 2),
        ("A=1\nf() { [ -f x ] && return; }\nf && A=2", 3),
        ("A=1\nf() { ([ -f x ] && return 1; true); }\nf && A=2", 3),
        ("A=1\nf() { A=2; }\nif [ -f x ]; then :; elif f; then :; fi", 3),
        ("A=1\n[ -f x ] && A=2 | cat\n[ -d y ] && A=3", 3),
    ],
)
def test_what_follows_a_return_that_only_a_shell_can_decide_depends_on_it(text: str, line: int) -> None:
    (problem,) = read_script(text + TRAIN + "--seed $A").problems
    assert f"--seed needs $A, which depends on line {line}: give" in problem


def test_what_follows_an_exit_that_only_a_shell_can_decide_runs_only_without_it() -> None:
    launch = read_script(
        '[ -f x ] || exit 1\nif [ -f y ]; then exit; fi\ncd z || { echo "no"; exit 1; }\nA=3' + TRAIN + "--seed $A"
    )
    assert (launch.argv[-1], launch.problems) == ("3", ())


@pytest.mark.parametrize(
    "before",
    [
        "if [ $# -ne 2 ]; then echo usage; exit -1; fi",
        'die() { echo $1; exit 255; }\n[ -n "$DATA" ] || die x',
        'if [ -z "$SLURM_JOB_ID" ]; then sbatch "$0"; exit 0; fi',
        '[ -z "$SLURM_JOB_ID" ] && { sbatch "$0"; exit; }',
        "case $STAGE in first) ;; *) exit ;; esac",
        "need() { if command -v $1; then return; fi; echo missing; exit; }\nneed nvcc",
    ],
)
def test_an_exit_that_is_no_sure_end_is_not_followed(before: str) -> None:
    assert argv(before + TRAIN + "--save x") == ["--save", "x"]


def test_what_a_subshell_sources_sets_nothing_outside() -> None:
    assert argv("( source env.sh )" + TRAIN + "--num-layers ${L:-24}") == ["--num-layers", "24"]


def test_a_script_that_ends_before_it_trains_says_where() -> None:
    guard = 'A=1\nif [ $# -lt 1 ]; then echo "usage: $0 FILE"; exit{}; fi' + TRAIN + "--save $1"
    with pytest.raises(
        ConfigurationError, match="; line 2 ends the script: is an argument missing, as in --set 1=VALUE"
    ):
        read_script(guard.format(""))
    assert argv(guard.format(""), **{"1": "x"}) == ["--save", "x"]
    launch = read_script(guard.format(" 1"))  # nothing trains after it, so that it was not meant
    assert launch.notes == ("line 2: exit is taken as not reached, since it fails",)
    assert launch.problems == ("line 3: --save needs $1, which the script does not set: give --set 1=VALUE",)


# ---------------------------------------------------------------------------------------------------- against bash

SIZES = 'f() { if [ "$1" = small ]; then A=2; return; fi; A=32; }'


@pytest.mark.parametrize(
    "text",
    [
        f"{SIZES}\nf small",
        f"{SIZES}\nf large",
        f"{SIZES}\nf small && A=$A$A",
        "f() { [ $1 = a ] && return 1; A=3; }\nf a || A=4",
        "f() { [ $1 = a ] || return 1; A=3; }\nf a || A=4",
        "f() { return 0; A=3; }\nf && A=4",
        "f() { case $1 in a) A=1; return ;; *) A=2 ;; esac; A=3; }\nf a",
        "f() { { A=1; return; }; A=2; }\nf",
        "f() { g; A=$A; A=4$A; }\ng() { A=3; return; A=2; }\nf",
        "f() { local A=1; (return; A=2); B=$A; }\nf; A=$B",
        "f() (A=1; B=2)\nf",
        "A=2; (exit; A=3); A=$A$A",
        "A=2; exit 3 | cat; A=$A$A",
        "f() { A=$(( $1 + 1 )); exit; }\nA=2; (f 6); A=$A$A",
        "A=1; A=2 | cat",
        "A=1; echo x | { read y; A=2; }",
        "A=1; echo x | A=2 | cat > /dev/null",
        "A=1; { A=2; } &\nwait",
        "A=1; [ 1 = 1 ] && A=2 & wait",
        "f() { (shift); A=$1; }\nf 3 4",
        "f() { shift | cat; A=$1; }\nf 3 4",
        "g() { A=1; }; (g() { A=2; }); g",
        "g() { A=1; }; g() { A=2; } & g",
        "A=5; f() { local A=1; (A=3); B=$A; }; f; A=$A$B",
        "f() { (local A=1); A=2; }; f",
    ],
)
def test_functions_and_subshells_leave_what_bash_leaves(text: str) -> None:
    text = f"A=0; B=0\n{text}"
    bash = subprocess.run(["bash", "-c", f'{text}\nprintf "<%s>" "$A"'], capture_output=True, text=True, check=True)
    launch = read_script(text + TRAIN + '--seed "$A"')
    assert (f"<{launch.argv[-1]}>", launch.problems) == (bash.stdout.splitlines()[-1], ())


def test_what_a_subshell_exports_is_exported_no_further() -> None:
    assert read_script("A=1; (export A); export B=2 | cat; bash -c 'export C=3'" + TRAIN).environment == {}


PLAIN = st.text("ab1-_./,:=+", min_size=1, max_size=5)
WORDS = st.recursive(
    st.one_of(
        PLAIN,
        st.text('ab $\\"x{}*#~!', max_size=6).map(lambda text: "'" + text + "'"),
        st.text("ab '#*x(){}&;|", max_size=6).map(lambda text: f'"{text}"'),
        st.sampled_from(["$X", "${Y}", '"$X"', "$E", '"$E"', "${Z:-d e}", '"${Z-q}"', "${E:-f}", "${X:+g}", "${#X}"]),
        st.sampled_from(["${A[@]}", '"${A[@]}"', '"${A[*]}"', "${A[1]}", "${#A[@]}", '"x${A[@]}y"', "x${A[@]}y"]),
        st.sampled_from(["$((2+3*4))", "$(( (1+N)*7 / 2 ))", "$((-7/2))", "$((-7%3))", "\\$X", "q\\ r", '"\\$a\\b"']),
    ),
    lambda inner: st.tuples(inner, inner).map("".join),
    max_leaves=4,
)
SETTING = "X=' p  q '; Y=r; E=; N=5; A=(1 '2 3' \"\" 4)"


@settings(max_examples=100, deadline=None)
@given(st.lists(WORDS, max_size=4), st.sampled_from(["A=({})", "A+=({})", 'S="{}"; A=($S)', "A=(x {}\n y)"]))
@example(["'a b'", '"$X"$X'], "A=({})")
def test_words_are_those_of_bash(words: list[str], form: str) -> None:
    if "S=" in form:
        words = [word for word in words if not set(word) & set("\"'\\")]
    text = f"{SETTING}\n{form.format(' '.join(words))}"
    bash = subprocess.run(
        ["bash", "+B", "-fu", "-c", text + '\nprintf "%s\\0" "${A[@]}"'], capture_output=True, text=True, check=False
    )
    assume(not bash.returncode and not bash.stderr)
    script = Script({"HOME": "/home/bash"})
    script.read(text + '\nprogram "${A[@]}"')
    expected = bash.stdout.split("\0")[:-1]
    read = list(script.commands[-1].words[1:])
    assert read == (expected if read or expected != [""] else [])


@pytest.mark.parametrize(
    ("head", "part", "count", "tail"),
    [("A=", "x", 250_000, ""), ('A="', "(", 250_000, '"'), ("A=", "\\a", 120_000, ""), ("A={", ",", 250_000, ""),
     ("", "(", 250_000, ""), ('A="<a', " ", 250_000, '"'), ("A=(", "$(x) ", 16_000, ")"), ("", "$A ", 16_000, ""),
     ("", "${", 60_000, ""), ("", "x;", 8_000, "")],
)  # fmt: skip
def test_long_scripts_take_time_in_proportion(head: str, part: str, count: int, tail: str) -> None:
    def seconds(count: int) -> float:
        text, start = head + part * count + tail, time.process_time()
        with suppress(ConfigurationError):
            read_script(text)
        return time.process_time() - start

    # In proportion is 4 times, by squares 16; the second is for noise of short times.
    assert seconds(count) < 10 * seconds(count // 4) + 1
