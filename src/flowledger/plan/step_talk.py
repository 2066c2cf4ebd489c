"""The collectives around the models in one step: lengths and rows, whole steps for estimators, totals, weights, metrics."""

from collections.abc import Iterator

from flowledger.plan.course import Course
from flowledger.plan.model_talk import FLOAT, INT, unit_bytes
from flowledger.plan.shards import Cut, Shards
from flowledger.plan.talk import Speaker, Talk

BOOL_PICKLED = 4  # a pickled bool
DUAL = ("vanilla", "dppo_tv", "dppo_kl", "bypass_mode")  # losses that count what the dual clip decides


def sampling(course: Course) -> Iterator[Talk]:
    """From the rollout to the filter: the widest response of all ranks, the baselines, whether anything is left."""
    greedy = course.config.needs("baseline")
    yield from Speaker(course.on, "rollout").say("the longest response", "all_reduce", "world", INT, 1 + greedy)
    if greedy:
        yield from Speaker(course.on, "reward").gather("baselines", "world", course.prompts_of_ranks, FLOAT)
    ranks = course.on.size
    objects = ranks * (INT + BOOL_PICKLED)
    yield from Speaker(course.on, "filter").say("whether nothing is left", "all_gather_object", "world", objects)


def balancing(course: Course) -> Iterator[Talk]:
    """The lengths of all samples, then each column of the rows to every rank that trains on them."""
    speaker = Speaker(course.on, "balance")
    for what in ("tokens of each sample", "tokens that count"):
        yield from speaker.gather(what, "world", course.samples_of_ranks, INT)
    copies = course.on.size // course.on.degree("dp")  # as many ranks have the same rows
    rows = course.samples_of_ranks[course.rank] * copies
    for what, width in _moved(course).items():
        yield from speaker.say(what, "all_to_all", "world", rows * width)


def _moved(course: Course) -> dict[str, int]:
    """Column -> bytes of a row."""
    whole, response = course.prompt + course.response, course.response
    components = len(course.config.reward.components)
    return {
        "full_sequence": whole * INT, "attention_mask": whole * INT, "position_ids": whole * INT,
        "response_mask": response * INT, "loss_mask": response * INT, "rollout_log_prob": response * FLOAT,
        "token_level_reward": response * FLOAT, "reward_components": components * FLOAT, "sample_id": INT,
        "group_id": INT, "why dropped": INT,
    }  # fmt: skip


def estimating(course: Course) -> Iterator[Talk]:
    """Estimators look at the whole step: each rank gathers what all data-parallel ranks have."""
    config, response = course.config, course.response
    there = {
        "why dropped": (True, INT),
        "token_level_reward": (True, response * FLOAT),
        "reward_components": (True, len(config.reward.components) * FLOAT),
        "loss_mask": (True, response * INT),
        "rollout_log_prob": (True, response * FLOAT),
        "old_log_prob": (config.old_log_prob_pass or course.bypasses, response * FLOAT),
        "ref_log_prob": (config.ref is not None, response * FLOAT),
        "values": (config.critic is not None, response * FLOAT),
        "sum_pi_squared": (config.old_log_prob_pass and config.needs("sum_pi_squared"), response * FLOAT),
        "group_id": (True, INT),
    }
    speaker = Speaker(course.on, "advantage")
    for what, (asked, width) in there.items():
        if asked:
            yield from speaker.gather(what, "dp", course.trained_of_ranks, width)


def from_last(course: Course, stage: str, tensors: int) -> Iterator[Talk]:
    """What the last stage of a pipeline has made of every token, to the others."""
    rows = course.samples // course.on.degree("dp")
    size = rows * course.response * FLOAT
    yield from Speaker(course.on, stage).say("numbers of all tokens", "broadcast", "pp", size, tensors)


def updating(course: Course, stage: str, steps: int, losses: int) -> Iterator[Talk]:
    """Around `steps` optimizer steps: the normalisers, whether anything is left, the norm of the gradient, the losses."""
    speaker, step = Speaker(course.on, stage), Speaker(course.on, stage, "step")
    yield from speaker.say("tokens and samples that count", "all_reduce", "dp", 2 * INT, steps)
    yield from step.say("norm of the gradient", "all_reduce", "world", FLOAT, steps)
    if stage == "update_actor":
        for kind, group in (("broadcast", "pp"), ("all_reduce", "dp")):
            yield from speaker.say("whether a token is left", kind, group, INT, steps)
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
    """What the update has added up of its tokens. A pipeline's last stage tells the others all it has: pickled, unknown here."""
    speaker, algorithm = Speaker(course.on, "update_actor"), course.config.algorithm
    sums = 4 + (algorithm.policy_loss in DUAL) + course.kl_in_loss
    yield from speaker.say("sums and what was first seen", "all_gather_object", "pp", None)
    yield from speaker.say("the largest ratio", "all_reduce", "dp", FLOAT)
    yield from speaker.say("sums over tokens", "all_reduce", "dp", sums * FLOAT)
    if course.bypasses and algorithm.rollout_correction.active:
        for what, width in (("first log-probs", FLOAT), ("rollout's", FLOAT), ("loss_mask", INT)):
            yield from speaker.gather(what, "dp", course.trained_of_ranks, course.response * width)


def syncing(course: Course) -> Iterator[Talk]:
    """Each weight whole on every rank: gathered over what FSDP cut, then over tp or ep, then sent along the pipeline."""
    _, shards = course.models["actor"]
    speaker = Speaker(course.on, "weight_sync")
    for cut in (
        one for layer in (*shards.stages[course.on.at(course.rank, "pp")], None) for one in _given(course, layer)
    ):
        fsdp = "expert_shards" if cut.weight.expert else "shards"
        yield from speaker.say(
            "a weight's pieces of FSDP",
            "all_gather",
            fsdp,
            unit_bytes(shards, [cut], fsdp, course.rank, course.itemsize),
        )
        for axis, text in cut.left.items():
            dim = int(text[len("Shard(") : -1])
            rows = course.on.degree(axis) * -(-cut.shape[dim] // course.on.degree(axis))
            whole = cut.weight.numel // cut.shape[dim] * rows * course.itemsize
            yield from speaker.say(f"a weight's pieces of {axis}", "all_gather", axis, whole)
    for one in shards.weights:
        yield from speaker.say("a weight", "broadcast", "pp", one.numel * course.itemsize)


def _given(course: Course, layer: int | None) -> tuple[Cut, ...]:
    """What this rank's stage gives to the others: of a tied weight the copy at the first end."""
    _, shards = course.models["actor"]
    copies = shards.tied and course.on.degree("pp") > 1 and course.on.at(course.rank, "pp") > 0
    return tuple(one for one in shards.held(course.rank, layer) if not (copies and one.weight.part == "embed"))


def measuring(course: Course) -> Iterator[Talk]:
    """Metrics are those of the whole step: of who sampled a row, and of who trained on it."""
    config, response, speaker = course.config, course.response, Speaker(course.on, None)
    yield from speaker.gather("prompt_length", "world", course.prompts_of_ranks, INT)
    sampled = {
        "group_id": INT, "attention_mask": (course.prompt + response) * INT, "response_mask": response * INT,
        "finish_reason": INT, "turns": INT, "rollout_log_prob": response * FLOAT, "reward": FLOAT,
        "reward_components": len(config.reward.components) * FLOAT, "loss_mask": response * INT,
    }  # fmt: skip
    for what, width in sampled.items():
        yield from speaker.gather(what, "world", course.samples_of_ranks, width)
    correction = config.algorithm.rollout_correction
    rejects, bypasses = bool(correction.rejections), course.bypasses
    before, within = rejects and not bypasses, rejects and bypasses
    trained = {
        "why dropped": (True, INT), "why dropped later": (before, INT),
        "old_log_prob": (config.old_log_prob_pass, response * FLOAT), "advantage": (True, FLOAT),
        "returns": (True, response * FLOAT), "loss_mask": (before, response * INT),
        "first log-probs": (not config.old_log_prob_pass or bypasses, response * FLOAT),
        "what the loss left": (within, response * INT), "values": (config.critic is not None, response * FLOAT),
    }  # fmt: skip
    for what, (asked, width) in trained.items():
        if asked:
            yield from speaker.gather(what, "dp", course.trained_of_ranks, width)
