"""Position ids and attention masks made again from lengths: prompts stand right-aligned, responses behind them.

Both are whole numbers that lengths decide, so their checksum can be made without the tensor.
"""

from array import array
from collections.abc import Iterator
from sys import byteorder
from zlib import crc32

from flowledger.diagnose.checks.answers import Breach, answer
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

SENTENCE = "positions count the tokens of a sequence from 0, padding left out"
CAUSE = "positions that count the padding, or run on from one sample into the next, shift what the model sees"
SAMPLES = 2_000  # rows of one tensor that are made again

WRITTEN = f"""
SELECT process, step, tensor_name, local_shape, checksum FROM tensors WHERE stage = 'rollout' AND access = 'write'
    AND micro_batch IS NULL AND tensor_name IN ('position_ids', 'attention_mask') AND checksum IS NOT NULL AND dtype = 'int64'
    AND len(local_shape) = 2 AND local_shape[1] <= ? AND source <> 'plan' AND {WHOLE} ORDER BY step, seq"""
PROMPTS = """SELECT process, step, local_shape FROM tensors
WHERE tensor_name = 'prompt_ids' AND stage = 'prompt' AND access = 'write' AND source <> 'plan'"""
LENGTHS = f"""
SELECT process, step, list(prompt ORDER BY number) AS prompts, list(response ORDER BY number) AS responses FROM (
    SELECT process, step, TRY_CAST(sample_id AS BIGINT) AS number, max(prompt_length) AS prompt, max(response_length) AS response
    FROM samples WHERE stage IN ('prompt', 'rollout') AND {WHOLE} GROUP BY process, step, sample_id)
GROUP BY process, step HAVING count(prompt) = count(*) AND count(response) = count(*) AND count(number) = count(*)"""


def check(ledger: Ledger) -> list[FindingRow]:
    """`positions_wrong`."""
    if ledger.directory.manifest.framework != "flowledger":
        return [
            answer("positions_wrong", SENTENCE, seen=0, needs=("a loop whose layout is known: framework = flowledger",))
        ]
    lengths = {(row["process"], row["step"]): (row["prompts"], row["responses"]) for row in ledger.rows(LENGTHS)}
    widths = {
        (row["process"], row["step"]): row["local_shape"][1]
        for row in ledger.rows(PROMPTS)
    }  # fmt: skip
    breaches, seen = [], 0
    for row in ledger.rows(WRITTEN, [SAMPLES]):
        key = row["process"], row["step"]
        if key not in lengths or key not in widths or row["local_shape"][0] != len(lengths[key][0]):
            continue
        seen += 1
        made = array("q", _values(row["tensor_name"], *lengths[key], widths[key], row["local_shape"][1]))
        if byteorder == "big":
            made.byteswap()
        if crc32(made.tobytes()) != row["checksum"]:
            breaches.append(
                Breach(
                    step=row["step"],
                    stage="rollout",
                    text=f"{row['tensor_name']} is not what the lengths of its samples give",
                )
            )
    lacks = () if seen else ("lengths of samples, and checksums: record.level = tokens",)
    return [answer("positions_wrong", SENTENCE, seen=seen, breaches=breaches, needs=lacks, cause=CAUSE)]


def _values(name: str, prompts: list[int], responses: list[int], start: int, width: int) -> Iterator[int]:
    """Row by row, of samples whose prompts end before column `start`."""
    for prompt, response in zip(prompts, responses, strict=True):
        left, length = start - prompt, prompt + response
        right = width - start - response
        if name == "attention_mask":
            yield from (0 for _ in range(left))
            yield from (1 for _ in range(length))
            yield from (0 for _ in range(right))
        else:
            yield from (0 for _ in range(left))
            yield from range(length)
            yield from (length - 1 for _ in range(right))
