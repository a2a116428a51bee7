"""Random launch scripts give the words that bash gives, or are refused by line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from megalite.errors import ConfigurationError
from megalite.extras.translation.script import read_script

START = "A=3; B='p  q'; C=abc.tar.gz; D=; L=(one 'two three' 4)\n"
SANDBOX = "ulimit -t 5 -f 1000; torchrun() { printf '%s\\0' \"$@\" > words; }; export -f torchrun\n"
"""Beginning of a script for bash: its program writes down its words."""

NAMES = st.sampled_from("ABCDEX")
NUMBERS = st.sampled_from(["0", "1", "2", "5", "-3", "010", "A", "$A", "${#L[@]}", "A*2", "(A+1)", "X"])
OPERANDS = st.sampled_from(
    ["d", "d e", '"d  e"', "'d e'", "$B", '"$B"', '"${L[@]}"', "a/$A", "", "*", "$((A=8))", "'*'"]
)
PATTERNS = st.sampled_from(
    ["a*", "*", "[a-c]*", "[!a]*", "[^a]*", "\\*", "'*'", "*.gz", "$B", '"$B"', "?", "3|p*", ".*"]
)
PARAMETERS = st.one_of(
    st.tuples(NAMES, st.sampled_from([":-", "-", ":=", "=", ":+", "+", ":?", "?"]), OPERANDS),
    st.tuples(NAMES, st.sampled_from(["#", "##", "%", "%%"]), PATTERNS),
    st.tuples(NAMES, st.sampled_from(["/", "//", "/#", "/%"]), st.sampled_from(["a/b", "a", "./_", "[ab]/x"])),
    st.tuples(NAMES, st.sampled_from(["^", "^^", ",", ",,", ":1", ":1:2", ": -2", ":A:1", "@Q"]), st.just("")),
    st.tuples(
        st.sampled_from(["#A", "#B", "!N", "#L", "#1", "1", "@", "*", "L[1]", "#L[1]", "L[-1]", "L[A-1]", "L[A=1]"])
    ),
    st.tuples(
        st.sampled_from(["L[@]", "L[*]", "#L[@]", "!L[@]", "L[@]:1", "L[@]:0:2", "L[@]/t/T", "L[@]%e", "M[k]", "M[@]"])
    ),
    st.tuples(
        st.sampled_from(["L[@]", "L[*]", "L[7]", "L", "1", "@", "*"]),
        st.sampled_from([":-", "-", ":+", "+", ":="]),
        OPERANDS,
    ),
).map(lambda parts: "${" + "".join(parts) + "}")
ARITHMETIC = st.one_of(
    st.tuples(
        NUMBERS,
        st.sampled_from(["+", "-", "*", "/", "%", "**", "<", "==", "&&", "||", "<<", "&", "^", ",", ">=", "!="]),
        NUMBERS,
    ).map(" ".join),
    st.tuples(NAMES, st.sampled_from(["=", "+=", "-=", "*=", "/=", "%=", "<<=", "|="]), NUMBERS).map("".join),
    st.sampled_from(
        ["++A", "A++", "--A", "A--", "- -A", "-A", "+A", "!A", "~A", "A-- - 1", "A>2?7:(A=9)", "L[0]", "E=2,E+1"]
    ),
    st.sampled_from(["A--1", "L[2]++", "X=A=4", "2#101", "0x1f", "C", "N", "1+(2", "T"]),
)
WORDS = st.one_of(
    st.sampled_from(
        ["1", "a", "'b c'", '"d $A"', "$A", '"$B"', "$B", "$D", '"$D"', "x$B", "'$A'", "\\$A", "a\\ b", "$'a\\tb'"]
    ),
    st.sampled_from(
        ['"$@"', "$*", '"$*"', "$#", "$1", '"$2"', "${12}", "$?", "$0", "$-", "*", "{a,b}", "{1..3}", "{$A,${B}}"]
    ),
    st.sampled_from(
        ['"${L[@]}"', '"x${L[@]}y"', "${L[*]}", '"${L[*]}"', '"${M[@]}"', "$L", "$N", "$(echo a b)", '"`echo c`"']
    ),
    st.sampled_from(
        ["a#b", "a=b", "~x", "A=1", "-n", "--", "$LINENO", "$RANDOM", "x\\\ny", "\u00a0$A", "'a'\"b\"$A", "$X"]
    ),
    PARAMETERS,
    PARAMETERS.map('"{}"'.format),
    ARITHMETIC.map("$(({}))".format),
)
FLAGS = st.sampled_from([*"ixralugA", "ir", "gx", "ai", "ga", "n"]).map("-{} ".format) | st.just("")
TESTS = st.one_of(
    st.tuples(st.sampled_from(["-n ", "-z ", "", "! ", "-v A -o ", "-n a -a "]), WORDS).map("[ {0[0]}{0[1]} ]".format),
    st.tuples(WORDS, st.sampled_from(["=", "!=", "-eq", "-ne", "-lt", "-ge", "\\<"]), WORDS).map(
        lambda t: f"[ {' '.join(t)} ]"
    ),
    st.tuples(WORDS, st.sampled_from(["==", "!=", "=~", "<", "-gt", "-eq"]), WORDS).map(
        lambda t: f"[[ {' '.join(t)} ]]"
    ),
    st.tuples(WORDS, PATTERNS.filter(lambda text: "|" not in text)).map("[[ {0[0]} == {0[1]} ]]".format),
    st.tuples(NUMBERS, NUMBERS).map("[[ {0[0]} -le {0[1]} || 1 -eq ${{E:=1}} ]]".format),
    ARITHMETIC.map("(( {} ))".format),
    st.sampled_from(
        ["true", "false", ":", "f", "g 1", "E=$(false)", "! f", "test $A", "[[ ( $A == 3 ) ]]", "read X <<< 7"]
    ),
    st.sampled_from(
        ["shift", "unset L", "let A-=3", "X=$((A=5))", "local A", "[ ! $A -o 1 ]", "[ -f words ]", "command -v f"]
    ),
)
SIMPLE = st.one_of(
    st.tuples(NAMES, st.sampled_from(["=", "+="]), WORDS).map("".join),
    st.tuples(NAMES, WORDS, NAMES, WORDS).map("{0[0]}={0[1]} {0[2]}={0[3]}".format),
    st.tuples(st.sampled_from(["L=", "L+=", "A=", "M+="]), st.lists(WORDS, max_size=3)).map(
        lambda t: f"{t[0]}({' '.join(t[1])})"
    ),
    st.tuples(st.sampled_from(["L[1]=", "L[A]=", "L[$A]+=", "L[5]=", "L=([2]=x ", "M[k]=", "A[1]="]), WORDS).map(
        lambda t: "".join(t) + ")" * ("(" in t[0])
    ),
    st.tuples(st.sampled_from(["declare", "local", "export", "readonly", "typeset"]), FLAGS, NAMES, WORDS).map(
        "{0[0]} {0[1]}{0[2]}={0[3]}".format
    ),
    st.tuples(st.sampled_from(["declare", "local", "export", "readonly"]), FLAGS, NAMES, NAMES).map(
        "{0[0]} {0[1]}{0[2]}=7 {0[3]}=${0[2]}".format
    ),
    st.tuples(st.sampled_from(["declare", "local", "export", "readonly"]), FLAGS, NAMES).map(
        "{0[0]} {0[1]}{0[2]}".format
    ),
    WORDS.map(": {}".format),
    WORDS.map("echo {} > /dev/null".format),
    WORDS.map("set -- {} z".format),
    WORDS.map("f {}".format),
    WORDS.map("g {} y".format),
    WORDS.map("E=9 f {}".format),
    WORDS.map("$D X={}".format),
    ARITHMETIC.map("(({}))".format),
    ARITHMETIC.map("let '{}'".format),
    WORDS.map("read -r A E <<< {}".format),
    st.tuples(st.sampled_from("AEX"), WORDS).map("printf -v {0[0]} '%s-' {0[1]}".format),
    st.tuples(NAMES, WORDS).map("eval '{0[0]}={0[1]}'".format).filter(lambda text: text.count("'") == 2),
    st.tuples(NAMES, WORDS).map('export "{0[0]}={0[1]}"'.format).filter(lambda text: text.count('"') == 2),
    st.sampled_from(
        ["shift", "shift 2", "shift 9", "set -- a 'b c' d", "set -e", "set a b", "set -o pipefail", "set --", "set -f"]
    ),
    st.sampled_from(
        [
            "IFS=,",
            "IFS=.",
            "IFS=",
            "unset IFS",
            "IFS=$'\\n'",
            "B=1,2; IFS=,",
            "local IFS=a",
            "IFS=:- read A E <<< 1:2-3",
        ]
    ),
    st.sampled_from(
        ["unset A", "unset -v B", "unset L", "unset 'L[1]'", "unset -f f", "unset $N", "unset D X", 'unset "C"']
    ),
    st.sampled_from(
        ["N=A", "N='A=6'", "declare -A M=([k]=v [j]='w x')", "declare -A M", "T='A=5'", "M=()", "declare -n E=A"]
    ),
    st.sampled_from(
        ["mapfile -t L <<< $B", "read", "read X << 'END'\na $A\nEND", "read -ra L <<< $B", "read X E << END\na $A\nEND"]
    ),
    st.sampled_from(
        ["while read X; do E+=$X; done <<< 'a'", "echo $A | read E", "(A=9)", "{ A=9; }", "A=9 &\nwait", "A=1 :"]
    ),
    st.sampled_from(
        ["f() { A=$1; E=$#; }", "f() { local A=4; g $A; B=$A; }", "g() { A=$1$2; return 1; }", 'f() { shift; C="$*"; }']
    ),
    st.sampled_from(
        [
            "f() { local A; X=${A:-unset}; }",
            "f() { local E=5 X=$E; A=$X; }",
            "g() { for x; do E+=$x; done; }",
            "f() { eval A=$1; }",
        ]
    ),
    st.sampled_from(
        [
            "f() { E=$A; A=1; }",
            "f() { [ $# = 1 ] && return; A=$#; }",
            "echo() { A=55; }",
            "f() { declare -g A=6; local -i E=2; E+=1; C=$E; }",
        ]
    ),
    st.sampled_from(
        [
            "shopt -s extglob",
            "shopt -s nocasematch",
            "command eval A=2",
            "builtin printf -v A 5",
            "command f",
            "time f 1",
            "function time { A=8; }",
            "set -o noexec",
        ]
    ),
    st.sampled_from(
        ["for x in 1 2 3; do A=$x; done", "for ((i=0; i<3; i++)); do A=$i; done", "for x in a; do continue; A=0; done"]
    ),
    st.sampled_from(
        [
            "while ((A-- > 0)); do E=$A; done",
            "until [ $A = 3 ]; do A=3; done",
            "while A=$((A+1)); [ $A -lt 6 ]; do :; done",
        ]
    ),
    st.sampled_from(
        ["while [ $# -gt 0 ]; do case $1 in a) A=$2; shift 2 ;; *) shift ;; esac; done", "for x in $B; do shift; done"]
    ),
)


def compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return a strategy for commands that hold other commands."""
    block = st.lists(inner, min_size=1, max_size=2).map("\n".join)
    return st.one_of(
        st.tuples(TESTS, block, block).map("if {0[0]}; then\n{0[1]}\nelse\n{0[2]}\nfi".format),
        st.tuples(TESTS, st.sampled_from(["&&", "||"]), inner).map(lambda t: f"{t[0]} {t[1]} {{ {t[2]}\n}}"),
        st.tuples(TESTS, block).map("if {0[0]}; then\n{0[1]}\nfi".format),
        st.tuples(WORDS, PATTERNS, block, st.sampled_from([";;", ";;", ";&", ";;&"]), block).map(
            "case {0[0]} in {0[1]})\n{0[2]}\n{0[3]}\n*)\n{0[4]}\n;;\nesac".format
        ),
        st.tuples(st.lists(WORDS, max_size=2).map(" ".join), block).map("for x in {0[0]}; do\n{0[1]}\ndone".format),
        st.tuples(st.sampled_from("fg"), block).map("{0[0]}() {{\n{0[1]}\n}}".format),
        block.map("(\n{}\n)".format),
        block.map("{{\n{}\n}}".format),
    )


END = st.tuples(
    st.lists(WORDS | NAMES.map('"${}"'.format), min_size=1, max_size=3).map(" ".join),
    st.sampled_from(["{}", "{}", "{}", "f() {{ {}; }}\nf '1 2' 3", "( {} )", "if [ $A = 3 ]; then {}; else {}; fi"]),
).map(lambda t: t[1].replace("{}", f"torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers {t[0]} --seed $A"))
SCRIPTS = st.tuples(st.lists(st.recursive(SIMPLE, compound, max_leaves=3), min_size=1, max_size=5), END).map(
    lambda t: START + "\n".join([*t[0], t[1].replace("{{", "{").replace("}}", "}")])
)


def bash_words(text: str, folder: Path) -> list[str] | None:
    """Return the words that bash gives to the program of a script; None if it never starts it."""
    (folder / "words").unlink(missing_ok=True)
    (folder / "script").write_text(SANDBOX + text)
    subprocess.run(
        ["/usr/bin/env", "-i", "PATH=/nonexistent", "/bin/bash", "--norc", "--noprofile", "script"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
        check=False,
    )
    try:
        return (folder / "words").read_bytes().decode().split("\0")[:-1]
    except OSError:
        return None


def difference(text: str, folder: Path) -> str:
    """Return how the words of a script differ from bash's; nothing if they do not or it is refused."""
    try:
        launch = read_script(text)
    except ConfigurationError:
        return ""
    if launch.problems or launch.uncounted:
        return ""
    expected = bash_words(text, folder)
    if expected is None or expected[3:] == list(launch.argv):
        return ""
    return f"{text}\nbash: {expected[3:]}\nread: {list(launch.argv)}"


@pytest.mark.parametrize(
    "text",
    [
        "declare -i A=10; A+=1",
        "A=1; : $((A=7))",
        "A=1; echo $((--A))",
        "A=1; f() { echo $((A++)); }; f",
        "B=2; A=$B A=1",
        "declare -u A=x; A=y",
        "A=1; declare B=7 A=$B",
        "IFS=,; B=1,2; A=(x $B); A=${#A[@]}",
        "case a in a) A=1 ;& *) A=2 ;; esac",
        'A="${*-3}"',
        "A=1 B=2",
        'A=3; set --; L=(); A="$A"; L=(5 "${L[@]}" "$@"); A=${#L[@]}',
        "A=1; declare -n E=A; E=4",
        "A=x\\\ny",
        "A=1; f() { A=$E; }; E=9 f; A=$A${E-1}",
        "A=1; E=2; f() { E=3; }; E=9 f; A=$E",
        "A=1; while A=$((A+1)); [ $A -lt 6 ]; do :; done",
        "A=1; until A=5; true; do :; done",
        "f() { if [ -f /nonexistent ]; then shift; fi; A=$1; }; f 1 2",
        "f() { [ -f /nonexistent ] && shift; A=$#; }; f 1 2",
        "f() { for x in; do shift; done; A=$1; }; f 1 2 3",
        "f() { shift 5; A=$1; }; f 1 2 3",
        "set -- 5; A=${1-3}",
        "set -u -- 5 6; A=$#",
        "set -o pipefail 5; A=$#",
        "A=1; set -o pipefail; false | true && A=2",
        "A=1; f() { local A; E=${A-7}; }; f; A=$E",
        "A=1; f() { local A=2; local A; E=$A; }; f; A=$E",
        "A=1; f() { declare -g A=5; }; f",
        "A=1; local A=2",
        "readonly A=1; A=2",
        "declare -r A=1; unset A; A=2",
        "A=1; readonly A; A=2",
        "A=1; case abc in \\*) A=2 ;; esac",
        "A=1; case bbc in [^a]*) A=2 ;; esac",
        "A=1; [[ bbc == [^a]* ]] && A=2",
        "A=1; case a in [[:alpha:]]) A=2 ;; esac",
        "A=1; case a in [\\!a]) A=2 ;; esac",
        "A=1; P='\\*'; case '*' in $P) A=2 ;; esac",
        "A=1; P=$(echo a); case a in $P) A=2 ;; esac",
        "A=1; [[ aa == @(a|aa) ]] && A=2",
        "L=(1 2); : ${L[5]:=x}; A=${#L[@]}",
        "L=(1); : ${L[1]:=x}; A=$L",
        "L=([2]=x); A=${L[0]-q}",
        "L=([1]=x [0]=y); A=${L[0]}",
        "L=(1 2 3); unset 'L[1]'; A=${#L[@]}",
        "X=$(true); A=1${X:+y}",
        "A=1; false; if [ $? -ne 0 ]; then A=2; fi",
        "A=1; false; E=$?; [ $E = 1 ] && A=2",
        "A=1; A=$(false) || E=1; A=${E-2}",
        "A=1; if X=$(false); then A=2; fi",
        "A=1; f() { X=`false`; }; f && A=2",
        "A=1; X=1 Y=$(false) && A=2",
        "A=1; $(false) && A=2",
        "A=2; export 'A=1'",
        "A=2; E=A=1; export $E",
        'A=2; f() { local "A=1"; E=$A; }; f; A=$E',
        'A=2; declare "A+=1"',
        "A=1; shopt -s nocasematch; case a in A) A=2 ;; esac",
        "A=1; shopt -s lastpipe; echo 2 | read A",
        "A=1; if [ -f /nonexistent ]; then f() { A=2; }; fi; f",
        "A=1; f() { A=3; }; [ -f /nonexistent ] && f() { A=2; }; f",
        "A=1; f() { return 1; }; if [ -f /nonexistent ]; then f() { return 0; }; fi; f || A=2",
        "A=1; f() { A=2; }; unset -f f; f",
        'A=1; eval "$(printf A=5)"',
        "A=1; eval $(printf A=5)",
        "A=1; export $(printf A=5)",
        "A=1; test() { A=2; }; test 5 = 6",
        "A=1; shift() { A=2; }; shift",
        "A=1; read() { A=2; }; read",
        "A=1; command eval A=2",
        "A=1; builtin printf -v A 5",
        "A=1; f() { A=2; }; time f",
        "A=1; trap 'A=2' DEBUG; :",
        "A=${OSTYPE-5}",
        'A=1; [ -z "$OPTIND" ] && A=2',
        'f() { A=$#; }; f ${C-"d  e"} "${@+}"',
        'L=("a b" c); L=("${L[@]+"${L[@]}"}"); A=${#L[@]}',
        'A=3; if [ -n "$@" ]; then A=2; fi',
        'A=1; B="p  q"; if [ $B = "p  q" ]; then A=2; fi',
        "A=3; for x in $((A--)); do :; done",
        "A=*",
        "A=1; L=(*); A=${#L[@]}",
        "[[ -3 -le 6 || 1 -eq ${A:=1} ]]; A=${A-2}",
        "A=1; A=a A=${A:-d}",
        "A=1; [[ 010 -eq 8 ]] && A=2",
        "D=; A=1${D-0}",
        "A=1; [[ -n a || -n b && -z c ]] && A=2",
        "A=1; set -o posix; A=2 :",
        "A=1; set -o keyword",
        'A=1; : "${E-$((A=8))}"; if true; then : "${E-$((A=8))}"; fi',
        "A=1; case ${L[*]:+$((A=8))} in *) ;; esac",
        "A=1; if [ ! $A -o 1 ]; then A=2; else A=3; fi",
        "A=1; export -gx A=2",
        "A=1; readonly -x A=2",
        "A=1; function time { A=2; }; time 5",
        "A=1; function time { A=2; }; time :",
        "A=1; function coproc { A=2; }; coproc :",
        "A=1; function export { A=2; }; export B=1",
        "A=1; function : { A=2; }; :",
        "shopt -s expand_aliases\nalias seven='A=7'\nA=1\nseven",
        "f() { A=$2; }; f $(true) 5 6",
        "f() { A=$2; }; f $X 5 6",
        'f() { A=$2; }; f "$X" 5 6',
        "f() { A=$2; }; X=$(echo a b); f $X 5 6",
        "f() { A=$2; }; f {1..3} 5 6",
        "f() { A=$2; }; L=($(echo a b) 5); f ${L[@]} 6",
        "f() { g $@; }; g() { A=$2; }; f `true` 5 6",
        "f() { A=$1; }; f 5 $(true) 6",
        "f() { A=$2; }; f $((2**3)) 5",
        "A=1; if true; then\nB=1 C=2\nelse\nA=5\nfi",
        "A=1; if false; then\nB=1 C=2  # no more\nelif true; then\nA=5\nfi",
        "A=3; unset L; : ${L[A=1]}",
        "A=3; L=(1); : ${#L[A=1]}",
        "A=3; declare -r A=7 A=4",
        "A=1; if true; then : ${1:=d}; A=2; fi",
        "A=1; if true; then : ${@:=d}; A=2; fi",
        "A=3; A=\u00a0$A",
        "A=1; C=a.b; if true; then : $((C)); A=2; fi",
        "A=1; C=a.b; if true; then : $((C*=2)); A=2; fi",
        "A=1; if true; then : $((1/0)); A=2; fi",
        "A=1; if true; then : $((A/D)) ${L[1/0]}; A=2; fi",
        "A=1; if true; then : $((08)); A=2; fi",
        "A=1; if true; then : $((A+D=4)); A=2; fi",
        "A=1; if true; then : $((2**-1)); A=2; fi",
        "A=3; f() { A=x A=y; declare -i A=1; }; f",
        "A=1; f() { A=2; local A=3; }; f",
        "f() { A=2; local A; A=3; }; A=1; E=9 f",
        "L=(1); f() { local L=(9); }; f; A=${L[0]}",
        "A=1; f() { if [ -f /nonexistent ]; then local A; fi; A=2; }; f",
    ],
)
def test_what_is_not_followed_is_no_complete_command(text: str, tmp_path: Path) -> None:
    script = f"{text}\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $A"
    assert bash_words(script, tmp_path) is not None
    assert difference(script, tmp_path) == ""


@pytest.mark.parametrize(
    "text",
    [
        "set -n",
        "set -o noexec",
        "set -eo noexec",
        "X=noexec; set -o $X",
        "set -o $(echo noexec)",
        "set -o onecmd",
        "shopt -so noexec",
        "time() { A=2; }; time",
    ],
)
def test_what_bash_never_starts_is_refused_by_line(text: str, tmp_path: Path) -> None:
    script = f"{text}\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 1"
    assert bash_words(script, tmp_path) is None
    with pytest.raises(ConfigurationError, match=r"line 1: .* is not followed"):
        read_script(script)


@pytest.mark.parametrize("options", ["-n -c", "-nc", "-o noexec -c", "-ec", "-o pipefail -c"])
def test_inner_shells_that_run_nothing_are_refused(options: str, tmp_path: Path) -> None:
    script = f"/bin/bash {options} 'torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 1'"
    if bash_words(script, tmp_path) is None:
        with pytest.raises(ConfigurationError, match=r"line 1: a shell with .*n.* is not followed"):
            read_script(script)
    else:
        assert read_script(script).argv == ("--num-layers", "1")


def test_inner_shells_have_what_all_is_exported_for(tmp_path: Path) -> None:
    inner = "/bin/bash -c 'torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers ${A-5} --seed ${B-6}'"
    for script in (f"set -a; A=1; set +a; B=2; {inner}", f"(set -o allexport); A=1; {inner}"):
        words = bash_words(script, tmp_path)
        assert words is not None
        assert list(read_script(script).argv) == words[3:]


@pytest.mark.parametrize("options", ["-n", "-t", "-xn"])
def test_a_first_line_that_lets_nothing_run_is_refused(options: str) -> None:
    script = f"#!/bin/bash {options}\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 1"
    with pytest.raises(ConfigurationError, match=f"line 1: #!/bin/bash {options} is not followed"):
        read_script(script)


QUICK = settings(
    max_examples=100, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


@QUICK
@seed(1)
@given(text=SCRIPTS)
def test_random_scripts(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert difference(text, tmp_path_factory.getbasetemp()) == ""


@pytest.mark.wide
@pytest.mark.parametrize("number", [1, 2, 3])
def test_more_random_scripts(number: int, tmp_path: Path) -> None:
    @settings(QUICK, max_examples=300)
    @seed(number)
    @given(text=SCRIPTS)
    def compare(text: str) -> None:
        assert difference(text, tmp_path) == ""

    compare()
