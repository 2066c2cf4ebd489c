"""Words that are neither tensor nor stage: who has what, who waits for whom, and what the tables and the page speak of."""

import re
from collections.abc import Iterator
from typing import Any

from flowledger.flow.errors import folded
from flowledger.show.languages import Language, said

# Word -> (other names, English, Chinese, where to look).
WORDS: dict[str, tuple[tuple[str, ...], str, str, tuple[str, ...]]] = {
    "placement": (
        (),
        "How a tensor lies on one axis of the mesh. Shard(d): cut along dimension d, each rank of the axis has another part. "
        "Replicate(): each has the same copy. Partial(): each has a summand, the sum over the axis is the value. "
        "In the ledger only axes that are not replicated are written, such as `dp: Shard(0)`.",
        "一个 tensor 在 mesh 的一个轴上怎么放。Shard(d)：沿第 d 维切开，轴上每个 rank 各有一份不同的。Replicate()：每个都有同样的副本。"
        "Partial()：每个有一个加数，沿轴求和才是其值。账本只写不是 Replicate 的轴，如 `dp: Shard(0)`。",
        ("tensors.placement", "show RUN shapes --json"),
    ),
    "shards": (
        ("shard",),
        "The parts of one tensor that ranks hold; put together, each counted once, they are the whole (law `shapes_conserved`). "
        "`local shard shape` is the part, `logical shape` the whole. As a group of ranks: dp, cp and sp together, over which FSDP "
        "cuts parameters, gradients and optimizer state.",
        "各 rank 所持有的同一个 tensor 的部分；拼在一起、每份只数一次，就是整体（定律 `shapes_conserved`）。"
        "`local shard shape` 是部分，`logical shape` 是整体。作为 rank 的组：dp、cp、sp 合起来，FSDP 沿它切参数、梯度与优化器状态。",
        ("show RUN shapes", "show RUN mesh"),
    ),
    "collectives": (
        ("collective",),
        "Calls that all ranks of a group enter together, such as all_reduce, all_gather, reduce_scatter and all_to_all: none "
        "goes on before all have come. Each is recorded with its type, group, bytes and time; a send and its receive likewise.",
        "一组 rank 一起进入的调用，如 all_reduce、all_gather、reduce_scatter、all_to_all：全部到齐之前谁也不往下走。"
        "每次调用都记下类型、组、字节数与时间；send 与 receive 同样。",
        ("show RUN balance", "show RUN log", "spans.comm_type"),
    ),
    "hang": (
        ("hangs",),
        "Ranks wait in a collective for one that does not get on, for longer than record.hang_after_s (300 seconds; 0: never "
        "looked for). The run then ends, and the finding says who waits for whom, and where the missing one is instead. "
        "A rank that gets on, only late, is no hang.",
        "各 rank 在一次集合通信里等一个不再前进的 rank，超过 record.hang_after_s（300 秒；0 为从不检查）。运行随即结束，"
        "finding 写明谁在等谁、缺席者在哪里。只是迟到而仍在前进的不算 hang。",
        ("show RUN findings", "sql RUN 'select * from waiting'"),
    ),
    "owner_rank": (
        ("owner_ranks", "authority"),
        "The ranks whose parts make up one copy of a tensor: every element of the whole lies on exactly one of them. Where "
        "others have copies, the table says by how many ranks it is held. `0, 2`: these two; `0-3`: 0 to 3; `0-12:4`: every "
        "fourth from 0 to 12. Not the column `owner`, which is who frees it (`role@stage`).",
        "拼出 tensor 一份副本的那些 rank：整体的每个元素恰好在其中一个上。若别的 rank 也有副本，表中写明共有多少个 rank 持有。"
        "`0, 2`：这两个；`0-3`：0 到 3；`0-12:4`：从 0 到 12 每隔 4 个。不同于 `owner` 列，后者是由谁释放（`role@stage`）。",
        ("tensors.owner_rank", "show RUN shapes"),
    ),
    "waiting": (
        ("wait",),
        "The view of who waits for whom: one row for each collective that has begun and not ended, and each of its peers; whether "
        "that one is there (`is_there`), and where it is instead. Of a run that ended well it has no rows.",
        "谁在等谁的视图：每个开始而未结束的集合通信、每个对端一行；它是否已到（`is_there`），没到的话在哪里。正常结束的运行没有任何行。",
        ("sql RUN 'select * from waiting'",),
    ),
    "passport": (
        ("passports",),
        "All that is known of one sample, hop by hop: which stages it went through, its part of every tensor that they read and wrote, "
        "what was learnt of it there, then its tokens one by one, and its group beside it. Tokens need record.level=tokens.",
        "一个样本的全部已知信息，逐站列出：经过哪些阶段、各阶段读写的张量中属于它的部分、在那里得知了什么，随后是逐个 token 及同组样本。"
        "token 需要 record.level=tokens。",
        ("sample RUN ID", "the page: Sample"),
    ),
    "watched": (
        ("watched step", "sampled step", "ops every"),
        "A step in which every operator was watched: step 0 and every record.ops_every-th (50; 0: none). Only of these are memory by kind, "
        "peaks of live tensors, and births and deaths of storages known; the others have the allocator's readings at their boundaries.",
        "逐算子观察的一步：第 0 步与每 record.ops_every 步（50；0 为从不）。只有这些步才知道按种类的显存、存活张量的峰值以及存储的产生与释放；"
        "其余各步只有边界处的分配器读数。",
        ("show RUN memory", "show RUN lifetimes"),
    ),
    "heat": (
        ("heat map", "heatmap"),
        "On the page, in the view of the mesh: one square a rank and step, the darker the longer that rank took, or waited, or the more "
        "tokens it had. A dark row is a slow rank, a dark column a slow step.",
        "页面 mesh 视图中的热力图：每个 rank 每一步一格，耗时、等待或 token 越多颜色越深。整行深色是慢 rank，整列深色是慢的一步。",
        ("show RUN --html FILE, view Mesh", "show RUN balance"),
    ),
    "e0": (
        ("m0", "µ0"),
        "Where a sample was trained on: `e0 m1 µ2` is epoch 0, mini-batch 1 (one optimizer step each), micro-batch 2 (one forward and backward "
        "each), all counted from 0. `+3`: three more slices of it.",
        "样本在何处参与训练：`e0 m1 µ2` 即 epoch 0、mini-batch 1（各做一次优化器更新）、micro-batch 2（各做一次前反向），均从 0 计数。"
        "`+3`：还有三个切片。",
        ("show RUN samples", "sample RUN ID"),
    ),
    "law": (
        ("laws",),
        "What must hold of any run, whatever its configuration: shapes and tokens are conserved, masks nest, lifetimes close, memory adds "
        "up, and the identities of a first step hold. Asked when a run ends; one that lacks its rows is skipped and says what it needs.",
        "任何配置的运行都必须满足的：形状与 token 守恒、掩码嵌套、生命周期闭合、显存相加一致、第一步的恒等式成立。运行结束时检查；"
        "缺少数据的定律标为 skipped 并说明所需。",
        ("show RUN findings", "shapes_conserved", "tokens_conserved", "masks_nest", "lifetimes_close", "memory_adds_up", "identities"),
    ),
    "finding": (
        ("findings", "alarm", "alarms", "check", "checks"),
        "One row for whatever was found out: a law, a check, an alarm, a rule of a plan, a crash. It has a verdict, a sentence, its evidence, "
        "and what to look at next. `flowledger explain ID` says what an id means.",
        "任何结论都是一行：定律、检查、告警、规划的规则、崩溃。每行有判定、一句话、依据与下一步。`flowledger explain ID` 说明编号的含义。",
        ("show RUN findings", "diagnose RUN"),
    ),
    "ledger": (
        ("the ledger", "run directory"),
        "The directory of a run: a manifest, and tables of spans, tensors, storages, memory, metrics, samples, tokens and findings, which a plan, "
        "a recording and an import write alike.",
        "一次运行的目录：清单与各表（时间段、张量、存储、显存、指标、样本、token、发现），规划、记录与导入写法相同。",
        ("sql RUN 'SHOW TABLES'", "docs/ledger.md"),
    ),
}  # fmt: skip
SLICE = re.compile(r"(?:[emµμu]\d+ ?)+")  # how `trained` is written
LABELS_ZH = {"look_at": "去看"}


def facts(word: str, lang: Language) -> Iterator[tuple[str, dict[str, Any]]]:
    """The definition of a word, by its own name or another, with its sort."""
    asked = "e0" if SLICE.fullmatch(word) else _spelt(word)
    for name, (others, english, chinese, places) in WORDS.items():
        if asked in (name, *map(_spelt, others)):
            yield "word", {"what": "word", "name": name, "asked": word, "meaning": said(english, chinese, lang), "look_at": list(places)}  # fmt: skip


def words() -> Iterator[str]:
    """Every name that is understood here."""
    for name, (others, *_) in WORDS.items():
        yield from (name, *others)


def _spelt(word: str) -> str:
    return folded(word).replace(" ", "_").replace("-", "_")
