"""The words that the reader of scripts finds are those that bash would start programs with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mrlhf.config.imports.shell import Script
from mrlhf.config.imports.words import UNKNOWN
from mrlhf.errors import ConfigError

# Each line of a script that starts `run` is compared with bash, word by word.
KNOWN = r"""
P=256 R=512
T=$((2*$((P+$((R*1)))))); run $T
run '$((' $((P+1))
N=$(((P + R) * 2)); M=$(( N > 1000 ? N % 1000 : -N )); E=$(expr $P + $R)
RUN=1 OTHER="a b" run a.b=$N "c=$M" d=$E e=$((P<<2)) f=$((-7/2)) g=$((010 + 0x10)) > log 2>&1
CMD=(run --x 1 "two words" k="$N"); CMD+=(--last)
"${CMD[@]}" "${#CMD[@]}" "${CMD[2]}" "${CMD[@]:1:2}" ${CMD[@]}
D=/models/name-7B/; NAME=$(basename $D)-x; UP=$(dirname "$D")
run $NAME $UP ${D%/} ${NAME%%-*} ${NAME##*-} ${NAME/7/8} ${NAME//-/_} ${NAME:0:4} ${NAME^^} ${#NAME}
run ${UNSET:-default $N} ${NAME:+set} "${UNSET-}" 'single $N' "it's" a\ b \$N {x,y}z
run logger=['console','wandb'] files="['a.parquet', 'b.parquet']" $'tab\there' "q\"q"
CONFIG="
   one.a=1 \
   two.b=$N
   three.c=x"
run $CONFIG
PATHS=$UP/a/$NAME/$N; run path=$PATHS
if [[ $NAME == "name"* && -n "$P" ]]; then K=1; elif [ $P = 2 ]; then K=2; else K=3; fi
if [ "$P" -lt 10 ]; then L=small; else L=large; fi
[ "$L" = large ] && B=big || B=tiny
((N > 10)) && Q=more
[[ ! $L =~ ^s ]] || Q=less
case $NAME in a|b) C=ab ;; name*) C=name ;; *) C=other ;; esac
run $K $L $B $Q $C
for one in 1 2; do run loop=$one; done
start() { local extra=$1; shift; run "$@" extra=$extra count=$#; }
start 5 a.b=1 "c d"
unset K; run k=${K:-gone}
run first | run second && run third; run not \
    | cat
run a.b=1 \
    # a comment ends the command
export Z="x y"; W=${Z// /_}
run $W
inner() { local N=$1; declare P=$1; run $N; [ $1 = 3 ] && return; run after; }
inner 3; inner 4; run $N $P
for one in 1 2 3 4; do [ $one = 2 ] && continue; [ $one = 4 ] && break; LAST=$one; run $one; done
test "$LAST" = 3 && T=4 || T=5; test $LAST -gt 3 || U=6; ( T=7; run $T ); run $T $U
while true; do V=8; break; done 2> /dev/null; run $LAST
run_it="run a.b=1 c=d"; eval $run_it; eval run "$N"
set -- a=b "c d"; run "$@" $1 $#
read -r -d '' ARGUMENTS <<EOF
 --one "$N" \
 --two
EOF
run $ARGUMENTS
if true; then run last; exit 0; fi
run not-reached
"""


def _found(text: str) -> list[list[str]]:
    script = Script()
    script.follow(text)
    return [command.words for command in script.commands]


def test_words_are_those_of_bash(tmp_path: Path) -> None:
    file = tmp_path / "script.sh"
    logs = tmp_path / "logs"
    logs.mkdir()
    # A log a process: those of a pipeline write at the same time.
    file.write_text('run() { printf "%s\\0" "$@" $\'\\n\' >> "$LOGS/$BASHPID"; }\n' + KNOWN)
    environment = {"LOGS": str(logs), "PATH": "/usr/bin:/bin", "HOME": "~", "LC_ALL": "C.UTF-8"}
    subprocess.run(["bash", str(file)], env=environment, cwd=tmp_path, capture_output=True)

    of_bash: list[list[str]] = [[]]
    for word in "".join(log.read_text() for log in logs.iterdir()).split("\0")[:-1]:
        if word == "\n":
            of_bash.append([])
        else:
            of_bash[-1].append(word)
    ours = [words[1:] for words in _found(KNOWN) if words[0] == "run"]
    assert len(ours) > 15
    assert sorted(ours) == sorted(of_bash[:-1])


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("run x=$(date +%s)", "$(date +%s)"),
        ("run x=$FROM_OUTSIDE/y", "${FROM_OUTSIDE}"),
        ("run x=$1", "$1"),
        ("if [ -f file ]; then X=1; else X=2; fi; run x=$X", "$X"),
        ("X=1; if other-program; then X=2; fi; run x=$X", "$X"),
        ('case "$FROM_OUTSIDE" in a) X=1 ;; *) X=2 ;; esac; run x=$X', "$X"),
        ("X=1; while other-program; do X=2; done; run x=$X", "$X"),
        ("for X in $(seq 3); do :; done; run x=$X", "$X"),
        ("for ((i = 0; i < 3; i++)); do X=$i; done; run x=$X", "$X"),
        ("read -r X < file; run x=$X", "$X"),
        ("run x=$((FROM_OUTSIDE * 2))", "$((FROM_OUTSIDE * 2))"),
        ("declare -A L=([small]=1 [large]=2); run ${L[small]}", "$L"),
        ("declare -A L; L[small]=1; run ${L[small]}", "$L"),
        ("run x=${!NAME}", "${!NAME}"),
        ("A=(1 2); A[7]=3; run x=${A[0]}", "$A"),
        ("X=1; grep -q H100 /proc/x 2> /dev/null && X=2; run x=$X", "$X"),
        ("which other && X=1 || X=2; run x=$X", "$X"),
        ("f() { if other; then X=1; return; fi; X=2; }; f; run x=$X", "$X"),
        ("X=1; while other; do X=2; break; done; run x=$X", "$X"),
        ("for X in 1 2; do if other; then break; fi; done; run x=$X", "$X"),
    ],
)
def test_what_only_a_run_could_tell_is_marked(text: str, unknown: str) -> None:
    [words] = [words for words in _found(text) if words[0] == "run"]
    assert words[1].split(UNKNOWN)[1].replace("\xa0", " ") == unknown


@pytest.mark.parametrize(
    "text",
    [
        'A="x=1 y=2"; if [[ $OUTSIDE == 1 ]]; then A+=" z=3"; fi; run $A w=4',
        'A=(x=1 y=2); if other; then A+=(z=3); else A+=(z=4); fi; run "${A[@]}" w=4',
        'A="x=1 y=2 z=3"; grep -q x y && A="x=1 y=2"; run $A w=4',
    ],
)
def test_what_branches_share_is_kept(text: str) -> None:
    [words] = [words for words in _found(text) if words[0] == "run"]
    assert words == ["run", "x=1", "y=2", f"{UNKNOWN}$A{UNKNOWN}", "w=4"]


@pytest.mark.parametrize(
    "text",
    [
        '[ -z "$M" ] && { echo "set M"; exit 1; }; run lr=7',
        'P=7; bash -c "run lr=$P"',
        "export P=7; srun --nodes=1 bash -lc 'cd /x && A=1 run lr=$P'",
        "P=7\nsbatch <<EOF\n#!/bin/bash\nrun lr=$P\nEOF",
        "P=7\ncat > job.sh <<EOF\nrun \\\n   lr=$P\nEOF\nsbatch job.sh",
        'ssh host "cd x; run lr=7"',
        'eval "run lr=7"',
        "sbatch --wrap='run lr=7'",
        "main() { run lr=$1; }\nmain 7",
        "[ -f config ] || exit 1\nrun lr=7",
        "set -euo pipefail\nif [ $# -lt 1 ]; then echo usage; exit 1; fi\nrun lr=7",
    ],
)
def test_commands_inside_of_others_are_found(text: str) -> None:
    assert ["run", "lr=7"] in _found(text)


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    """Neither what it starts, nor what bash would start when it computes a value."""
    trace = tmp_path / "trace"
    evil = f"touch {trace}"
    for line in (
        f"{evil}; X=$({evil}); Y=`{evil}`; run $X $Y <({evil})",
        f"V='a[$({evil})]'; run $((V)) ${{A[$V]}} ${{HOME:$V}}; [[ $V -eq 1 ]]; ((V)); A[$V]=1",
        f'V=\'$({evil})\'; run ${{V@P}} "$V" $V; eval "$V"',
        f"run > {trace}; : > {trace}; exec > {trace}; cat <<< x > {trace}",
        f"PATH=/bin:/usr/bin; run ${{X:=$({evil})}} $(({evil.replace(' ', '+')}))",
        f"enable {evil}; BASH_ENV={trace}; LD_PRELOAD={trace}; IFS=/; run $LD_PRELOAD $IFS",
        f"V='a[$(>{trace})]'; test $V -eq 1; [ $V -eq 1 ]; [[ -v $V ]]; [ -v $V ]",
        f"V='a[$(>{trace})]'; printf -v $V 1; for ((V; V < 1; V++)); do :; done; let $V; unset $V",
        f"trap '{evil}' EXIT DEBUG; f() {{ {evil}; }}; f; coproc {evil}",
    ):
        _found(line)
        assert not trace.exists(), line

    # Two parts join to code where bash expands an index or computes: 2 is what the code prints.
    (tmp_path / "two").write_text("2")
    for code in ("(printf 2)", f"(<{tmp_path}/two)"):
        for joined in (
            f"V='B[$'; W='{code}]'; run \"${{A[$V$W]}}${{B[0]}}\"",
            f"V='B[$'; W='{code}]'; run ${{HOME:0:$V$W}}",
            f"run ${{A[B[\\${code}]]}}",
            f'run ${{A[B["$"{code}]]}}',
            f"run ${{A[$'B[\\x24{code}]']}}",
            f"run ${{A[B[$'\\x24'{code}]]}}",
            f"E=; run ${{A[${{E:-B[$}}{code}]]}}",
            f"run ${{A[$({code[1:-1]});{code}]}}",
            f"run $(({code[1:-1]});{code})",
        ):
            found = _found(f"A=(p q r s t u); B=(0 0 5); {joined} ${{B[0]}}")
            runs = [words for words in found if words[0] == "run"]
            assert not {"u", "2", "22", "u0"} & {word for words in runs for word in words}, joined


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=x\n" + "A=$A$A\n" * 60, "too long"),
        ("for a in 1 2 3 4 5 6 7 8 9; do\n" * 6 + "run\n" + "done\n" * 6, "too many steps"),
        ("f() { f; }\nf\n", "too deep"),
        ('X=\'eval "$X"\'\neval "$X"\n', "too"),
        ("run $((" + "(" * 9000 + "1" + ")" * 9000 + "))\n", "too deep"),
        ("N=$((" + "+".join(["1"] * 100_000) + "))\n", "too deep"),
    ],
)
def test_a_script_without_end_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _found(text)
