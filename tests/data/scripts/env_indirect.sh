#!/usr/bin/env bash
# Indirection, prefixes and nested defaults; several programs in one script.
MODEL_small=Qwen/Qwen3-0.6B
MODEL_large=Qwen/Qwen3-32B
which=${WHICH:-small}
var="MODEL_${which}"
model=${!var}
name=${model##*/}; org=${model%%/*}; stem=${name%-*}
opts=("--model=$model" --name "${name,,}")
opts[5]=--sparse
( cd sub 2>/dev/null; opts+=(--in-subshell); env -u FOO A=1 B="two words" python3 prepare.py "${opts[@]}" "$A" )
python3 eval.py ${opts[@]:0:2} "${opts[@]/#--/++}" ${#opts[@]} "${!opts[@]}" --org ${org:+"$org"} ${missing:+no} "${stem:0:4}" "${stem:(-2)}" || true
if ! [[ -n $which && ( $which == s* || $which == x ) ]]; then python3 never.py now; fi
function run_it { "$@"; }
run_it exec python3 final.py "$*" "${*:-none}" "$((${#name} > 4 ? 1 << 3 : 0))" "${1-}" "$#"
python3 after_exec.py never
