#!/bin/bash
# Redirections, here-documents, groups and the like around commands.
exec 3>&1
python3 a.py one > >(cat > /dev/null) two 2>&1
python3 b.py < <(echo x) >/dev/null 3<&- 2>/dev/null | tail -1 |& cat
python3 c.py --x 1 &>/dev/null --y 2
python3 - first <<'EOF' second
print("it's not $a command")
python3 never.py x
EOF
python3 - <<-EOF && python3 after.py heredoc
	$(echo "in a document")
	EOF
{ python3 d.py in a group; python3 e.py too; } 2>&1 | cat
( A=inner; python3 f.py "$A" ); python3 g.py "${A-outer}"
if true
then python3 h.py then
fi | cat
for x in a \
  'b c' d{1,2} # with a comment
do
  python3 i.py "$x"
done > /dev/null
for ((i = 0, j = 5; i < j; i += 2, j--)); do python3 j.py $i $j; done
case "a*b" in
  (a\*b) python3 k.py quoted ;;&
  *) python3 k.py all ;;
  zzz) python3 k.py never ;;
esac
case x.tar.gz in *.zip|*.tar.?z) python3 l.py archive;; esac
! false && python3 m.py not
false || { python3 n.py or; }
true && false || python3 o.py and or
[[ abc == a?c && ! abc == *d ]] && python3 p.py match
[[ "a.c" == "a?c" ]] || python3 p.py quoted pattern
[[ 12 -gt 9 && 2 > 10 ]] && python3 q.py numbers
[ 1 -eq 01 -a "x" != "y" -o -n "" ] && python3 r.py tests
test -z "" && python3 s.py test
(( 3 > 2 )) && python3 t.py arithmetic $(( 7 / 2 )) $((-7 / 2)) $((-7 % 3)) $((2 ** 10)) $((0x1F + 010 + 2#101)) $((1 ? 5 : 6))
n=3; while (( n-- > 0 )); do (( n == 1 )) && continue; python3 u.py $n; done
printf -v padded '%03d' 7; python3 v.py "$padded"
set -- "a b" c
for a; do python3 w.py "for $a"; done
for a
do python3 w.py "again $a"
done
python3 w.py "$@" "$#" "$*" "${@:2}" "${!#}" "${@: -1}"; shift; python3 w.py "$@"
f() { local v=1; g; python3 x.py "$v" "$w"; return 3; python3 x.py never; }
g() { v=2; w=3; }
f || python3 y.py status "${v:-unset}"
read -r first rest <<< "one two  three"; python3 z.py "$first" "$rest"
IFS=: read -ra parts <<< "a:b::c"; python3 z.py "${parts[@]}" "${#parts[@]}"
list="x y"; IFS=,; set -f; v="p,q r"; python3 aa.py $v $list; unset IFS; set +f
array=([2]=c [0]=a); array+=(d); python3 ab.py "${array[@]}" "${!array[@]}" "${array[-1]}"; unset 'array[0]'; python3 ab.py "${#array[@]}"
declare -A map=([k]=v ["a b"]='c d'); map[z]=1; key="a b"; python3 ac.py "${map[$key]}" "${map[k]}" "${#map[@]}"
export E1=1 E2="two words"; declare -x E3=$E2; python3 ad.py $E1 "$E3"
p=/a/b.tar.gz; python3 ae.py ${p##*/} ${p%/*} ${p%%.*} ${p#*.} ${p/a/X} ${p//[ab]/_} ${p/#\/a/R} ${p/%gz/xz} ${p^^} ${p:3} ${p:1:2} ${p: -2} ${#p}
unset u; python3 af.py "${u:=assigned}" $u ${u:+alt} "${none:+alt}" ${none-d e} "${none-d e}" ${none:-"d e"}
python3 ag.py a"b c"d'e f'$'g\th' "h\"i" \$j "k\\l" m\ n $'\u00e9' "o`echo p`q" "$(echo "r  s")" $(echo "t  u")
python3 ah.py \
  --last # a comment ends the command
python3 ai.py ~/x a=~/y "~/z" b:~ 'c'~ key.k=~/w; X=~/p:~/q; python3 ai.py $X
env -i PATH="$PATH" SHIM_OUT="$SHIM_OUT" LC_ALL=C.UTF-8 Z=1 python3 aj.py env
bash -c 'python3 ak.py "$0" "$@" $#' zero "one 1" two
time python3 al.py timed
eval 'python3 am.py' "'eval  ed'" '"$n"'
python3 an.py \a "\a" '\a' a\
b "c\
d" 'e\
f'
exit 0
python3 never.py
