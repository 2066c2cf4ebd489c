"""Does a report's first finding name its cause? Real, public bug reports, with what the reporter had and nothing else.

    python benchmarks/bug_reports.py --cases FILE [--labels FILE] [--out answers.jsonl] [--misses]

FILE: one JSON object a line with `id`, `framework`, `model`, `hardware`, `config`, `symptom`, `measured`; every other column is
left unread. Labels: one JSON object a line, `id`, `decidable` (whether the inputs can decide), `accept` (a list of alternatives, each a
list of patterns that must all stand in the first finding's sentence), written by a person from what the thread established, before
the rules. Only the benchmark reads them. The peer beside is a table of keywords, scored alike. Exit code 1 where a target is missed.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from flowledger.cli.reports import with_plan
from flowledger.diagnose.reports.answers import answer
from flowledger.diagnose.reports.read import of_mapping

ROOT = Path(__file__).resolve().parent.parent
CASES, LABELS = ROOT / "tests/data/reports/cases.jsonl", ROOT / "tests/data/reports/labels.jsonl"
GIVEN = ("framework", "model", "hardware", "config", "symptom", "measured")
TARGET = 0.8  # of the reports whose inputs decide
SURE = 0.7
QUOTED = re.compile(r"“[^”]*”")
# The peer: the first keyword that stands in the report names the cause. What a table of error messages comes to.
KEYWORDS = (
    (r"equal chunk|divisible", "the batch size must be divisible by the number of GPUs (dp world)"),
    (r"size of tensor|expected size|mismatch", "tensor shapes do not match: check max_prompt_length"),
    (r"wake_up|cumem", "vLLM wake_up runs out of memory: lower gpu_memory_utilization"),
    (r"ray.*oom|host|ram\b", "host RAM is full: reduce offload or the number of workers"),
    (r"logits|vocab|entropy", "the logits over the vocabulary are too large: reduce the micro-batch"),
    (r"fragment|expandable", "memory fragmentation: set expandable_segments:True"),
    (r"\boom\b|out of memory", "out of GPU memory: reduce the micro-batch size or gpu_memory_utilization"),
    (r"nan", "NaN: lower the learning rate and check gradient clipping"),
    (r"hang|nccl|timeout|stuck", "NCCL timeout: ranks do not reach the same collective, raise the timeout"),
    (r"log-?prob|mismatch|ratio", "rollout and trainer log-probs differ: precision mismatch of the engines"),
    (r"truncat|clip", "responses are truncated: raise max_completion_length"),
    (r"slow|idle|straggl|time", "load imbalance: balance sequence lengths over dp ranks"),
)

Answer = dict[str, Any]


def ours(case: Mapping[str, Any]) -> Answer:
    first = answer(with_plan(of_mapping({key: case[key] for key in GIVEN if key in case})))[0]
    return {
        "id": case.get("id"), "finding": first.id, "sentence": first.message, "confidence": first.confidence, "verdict": first.verdict,
        "evidence": first.evidence, "fix": first.fix, "needs": first.needs, "next_step": first.next_step,
    }  # fmt: skip


def peer(case: Mapping[str, Any]) -> Answer:
    text = json.dumps([case.get(key) for key in ("symptom", "config")])
    sentence = next((says for words, says in KEYWORDS if re.search(words, text, re.IGNORECASE)), "cannot tell")
    told = sentence != "cannot tell"
    return {
        "id": case.get("id"),
        "sentence": sentence,
        "verdict": "fail" if told else "skipped",
        "confidence": 0.7 * told,
    }


def judged(reply: Answer, label: Mapping[str, Any]) -> str:
    """right, wrong or cannot_tell."""
    if reply["verdict"] == "skipped":
        return "cannot_tell"
    own = QUOTED.sub("", reply["sentence"])  # the reporter's words, which a finding may quote, do not count
    found = any(all(re.search(one, own, re.IGNORECASE) for one in every) for every in label["accept"])
    return "right" if found else "wrong"


def score(replies: Sequence[Answer], labels: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Counts; `decidable_*` are of the reports whose inputs decide, `undecidable_*` of the others."""
    if not labels:
        told = sum(reply["verdict"] != "skipped" for reply in replies)
        return {"reports": len(replies), "told": told, "cannot_tell": len(replies) - told}
    counts: Counter[str] = Counter()
    for reply in replies:
        label = labels.get(str(reply["id"]))
        if label is None:
            continue
        verdict = judged(reply, label)
        counts[verdict] += 1
        counts[f"{'decidable' if label['decidable'] else 'undecidable'}_{verdict}"] += 1
        counts["confidently_wrong"] += verdict == "wrong" and (reply["confidence"] or 0) >= SURE
    names = [
        f"{kind}_{verdict}" for kind in ("decidable", "undecidable") for verdict in ("right", "cannot_tell", "wrong")
    ]
    return {
        "reports": len(replies),
        **{name: counts[name] for name in ("right", "cannot_tell", "wrong", "confidently_wrong", *names)},
    }


def lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            yield json.loads(line)


def label_of(case: Mapping[str, Any]) -> dict[str, Any] | None:
    """A label that stands in the case itself: of the labels' form, or patterns of which one is enough."""
    column = case.get("verdict_label")
    if isinstance(column, dict) and "accept" in column:
        return {"decidable": case.get("inputs_suffice", "yes") == "yes", **column}
    patterns = [column] if isinstance(column, str) else column if isinstance(column, list) else []
    accept = [[one] if isinstance(one, str) else one for one in patterns]
    return {"decidable": case.get("inputs_suffice", "yes") == "yes", "accept": accept} if accept else None


def labels_of(cases: Sequence[Mapping[str, Any]], path: Path) -> dict[str, dict[str, Any]]:
    """Case -> label: of the cases' own column, else of the file, for cases that it names."""
    own = {str(case.get("id")): label for case in cases if (label := label_of(case))}
    named = {str(case.get("id")) for case in cases}
    filed = {str(row["id"]): row for row in lines(path)} if path.exists() else {}
    return own or {name: row for name, row in filed.items() if name in named}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--labels", type=Path, default=LABELS)
    parser.add_argument("--out", type=Path, help="a line of JSON per report")
    parser.add_argument("--misses", action="store_true", help="print what is not right")
    options = parser.parse_args(words)
    cases = list(lines(options.cases))
    labels = labels_of(cases, options.labels)
    sides: dict[str, Callable[[Mapping[str, Any]], Answer]] = {"ours": ours, "peer": peer}
    replies = {side: [make(case) for case in cases] for side, make in sides.items()}
    if options.out:
        options.out.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in replies["ours"]), encoding="utf-8"
        )
    if options.misses:
        show(replies["ours"], labels)
    for side in sides:
        print(f"{side:>5} ", score(replies[side], labels))
    figures = score(replies["ours"], labels)
    print(json.dumps({**figures, "peer": score(replies["peer"], labels)}))
    return int(bool(labels) and not good(figures))


def good(figures: Mapping[str, Any]) -> bool:
    decidable = sum(figures[f"decidable_{verdict}"] for verdict in ("right", "cannot_tell", "wrong"))
    return bool(figures["decidable_right"] >= TARGET * decidable and figures["confidently_wrong"] == 0)


def show(replies: Sequence[Answer], labels: Mapping[str, Mapping[str, Any]]) -> None:
    for reply in replies:
        label = labels.get(str(reply["id"]))
        verdict = judged(reply, label) if label else reply["verdict"]
        wanted = "decidable" if label and label["decidable"] else "undecidable"
        if verdict != "right":
            print(f"{reply['id']} {wanted} {verdict} [{reply['finding']} {reply['confidence']}] {reply['sentence']}")


if __name__ == "__main__":
    sys.exit(main())
