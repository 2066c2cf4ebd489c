"""The collectives around the models in one step: lengths and rows, whole steps for estimators, totals, weights, metrics."""

from collections.abc import Iterator

from flowledger.config import passes
from flowledger.plan.course import Course
from flowledger.plan.model_talk import FLOAT, INT, unit_bytes
from flowledger.plan.shards import Cut, Shards
from flowledger.plan.talk import Speaker, Talk

DOUBLE, NARROW, BIT = 8, 4, 1  # bytes of a sum or extreme, of a token or its position on its way, of what is yes or no
SUMS = 6  # that the update takes over tokens, each with whether it is there, and the largest ratio


def sampling(course: Course) -> Iterator[Talk]:
    """From the rollout to the filter: the widest response of all ranks, the baselines, whether anything is left."""
    greedy = course.config.needs("baseline")
    yield from Speaker(course.on, "rollout").say("the longest response", "all_reduce", "world", INT, 1 + greedy)
    if greedy:
        yield from Speaker(course.on, "reward").gather("baselines", "world", course.prompts_of_ranks, FLOAT)
    yield from Speaker(course.on, "filter").say("whether something is left", "all_reduce", "world", INT)


def balancing(course: Course) -> Iterator[Talk]:
    """The lengths of all samples and whether they count, then the rows to every rank that trains on them."""
    speaker = Speaker(course.on, "balance")
    samples = course.samples_of_ranks
    yield from speaker.gather("lengths, and who counts", "world", samples, 2 * NARROW)
    copies = course.on.size // course.on.degree("dp")  # as many ranks have the same rows
    rows = samples[course.rank] * copies
    yield from speaker.say("rows", "all_to_all", "world", rows * sum(_moved(course).values()))


def _moved(course: Course) -> dict[str, int]:
    """Column -> bytes of a row."""
    whole, response = course.prompt + course.response, course.response
    components = len(course.config.reward.components)
    return {
        "full_sequence": whole * NARROW, "attention_mask": whole * BIT, "position_ids": whole * NARROW,
        "response_mask": response * BIT, "loss_mask": response * BIT, "rollout_log_prob": response * FLOAT,
        "token_level_reward": response * FLOAT, "reward_components": components * FLOAT, "sample_id": INT,
        "group_id": INT, "why dropped": BIT,
    }  # fmt: skip


def estimating(course: Course) -> Iterator[Talk]:
    """Estimators look at the whole step: each rank gathers what they read, and of each sample whether it was kept."""
    config, response = course.config, course.response
    old = config.old_log_prob_pass or course.bypasses
    there = {
        "token_level_reward": response * FLOAT,
        "loss_mask": response * BIT,
        "group_id": INT,
        "reward_components": len(config.reward.components) * FLOAT,
        "rollout_log_prob": response * FLOAT,
        "old_log_prob": old * response * FLOAT,
        "values": (config.critic is not None) * response * FLOAT,
        "sum_pi_squared": config.old_log_prob_pass * response * FLOAT,
    }
    reads = passes.reads_whole(config.algorithm)
    width = BIT + sum(width for name, width in there.items() if name in reads)
    if config.ref is not None and config.algorithm.kl_in == "reward" and old:
        width += FLOAT  # KL of each sample
    yield from Speaker(course.on, "advantage").gather("what is read of a step", "dp", course.trained_of_ranks, width)


def from_last(course: Course, stage: str, tensors: int) -> Iterator[Talk]:
    """What the last stage of a pipeline has made of every token, to the others."""
    rows = course.samples // course.on.degree("dp")
    size = rows * course.response * FLOAT * tensors
    yield from Speaker(course.on, stage).say("numbers of all tokens", "broadcast", "pp", size)


def updating(course: Course, stage: str, steps: int, losses: int) -> Iterator[Talk]:
    """Around `steps` optimizer steps: the normalisers, the norm of the gradient, the losses and what goes with them."""
    speaker, step = Speaker(course.on, stage), Speaker(course.on, stage, "step")
    yield from speaker.say("tokens and samples that count", "all_reduce", "dp", 2 * INT, steps)
    yield from step.say("norm of the gradient", "all_reduce", "world", FLOAT, steps)
    for kind, group in (("broadcast", "pp"), ("all_reduce", "dp")):
        yield from speaker.say("losses", kind, group, losses * FLOAT, steps)


def tied(course: Course, stage: str, shards: Shards, steps: int) -> Iterator[Talk]:
    """Both ends of a pipeline have the weight of embedding and head, and exchange its gradient."""
    at, last = course.on.at(course.rank, "pp"), course.on.degree("pp") - 1
    if not shards.tied or 0 < at < last:
        return
    (embedding,) = (one for one in shards.held(course.rank, None) if one.weight.part == "embed")
    size = shards.piece(embedding, course.rank) * course.itemsize
    for way in ("send", "recv"):
        yield from Speaker(course.on, stage).say("gradient of the tied weight", way, "pp", size, steps)


def summing(course: Course) -> Iterator[Talk]:
    """What the update has added up of its tokens, and first seen of them: a pipeline's last stage tells the others."""
    speaker, correction = Speaker(course.on, "update_actor"), course.config.algorithm.rollout_correction
    yield from speaker.say("sums over tokens", "broadcast", "pp", (2 * SUMS + 1) * DOUBLE)
    yield from speaker.say("sums over tokens", "all_reduce", "dp", 2 * SUMS * DOUBLE)
    yield from speaker.say("the largest ratio", "all_reduce", "dp", DOUBLE)
    if not course.config.old_log_prob_pass or course.bypasses:
        token = FLOAT + (BIT if course.bypasses and correction.rejections else 0)
        size = course.samples // course.on.degree("dp") * course.response * token
        yield from speaker.say("first log-probs", "broadcast", "pp", size)
    if course.bypasses and correction.active:
        width = course.response * (2 * FLOAT + BIT)
        yield from speaker.gather("first log-probs and rollout's", "dp", course.trained_of_ranks, width)


def syncing(course: Course) -> Iterator[Talk]:
    """Each weight whole on every rank: gathered over what FSDP cut, then over tp or ep, then sent along the pipeline."""
    shards = course.models["actor"][1].trained
    speaker = Speaker(course.on, "weight_sync")
    for cut in (
        one for layer in (*shards.stages[course.on.at(course.rank, "pp")], None) for one in _given(course, layer)
    ):
        fsdp = "expert_shards" if cut.weight.expert else "shards"
        yield from speaker.say(
            "a weight's pieces of FSDP",
            "all_gather",
            fsdp,
            unit_bytes(course, shards, [cut], fsdp),
        )
        for axis, text in cut.left.items():
            dim = int(text[len("Shard(") : -1])
            rows = course.on.degree(axis) * -(-cut.shape[dim] // course.on.degree(axis))
            whole = cut.weight.numel // cut.shape[dim] * rows * course.itemsize_of(cut.weight)
            yield from speaker.say(f"a weight's pieces of {axis}", "all_gather", axis, whole)
    for one in shards.weights:
        yield from speaker.say("a weight", "broadcast", "pp", one.numel * course.itemsize_of(one))


def _given(course: Course, layer: int | None) -> tuple[Cut, ...]:
    """What this rank's stage gives to the others: of a tied weight the copy at the first end."""
    shards = course.models["actor"][1].trained
    copies = shards.tied and course.on.degree("pp") > 1 and course.on.at(course.rank, "pp") > 0
    return tuple(one for one in shards.held(course.rank, layer) if not (copies and one.weight.part == "embed"))


def measuring(course: Course) -> Iterator[Talk]:
    """Metrics are those of the whole step: extremes of all numbers that they are figures of, then counts, sums and squares."""
    components, critic = len(course.config.reward.components), course.config.critic is not None
    numbers = 12 + components + 2 * critic
    for what, each in (("extremes", 2), ("sums", 3)):
        yield from Speaker(course.on, None).say(f"{what} of metrics", "all_reduce", "world", numbers * each * DOUBLE)
