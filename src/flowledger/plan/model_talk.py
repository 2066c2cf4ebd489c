"""The collectives of one pass of micro-batches through a model that is cut over ranks, from the algorithms' arithmetic.

FSDP2 gathers a unit before it computes and again before its backward, then reduces and cuts its gradients. Megatron's
tensor parallelism adds up twice a layer and direction; with sequence parallelism each sum is a reduce-scatter and a
gather. Ulysses exchanges queries, keys, values and what was found. A ring passes keys and values on, and in backward
their gradients in float32. A vocabulary that is cut needs a maximum, a sum, and the one logit of each token.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

from flowledger.plan.course import Course
from flowledger.plan.own_loop import asked
from flowledger.plan.rows_of_tokens import Micro
from flowledger.plan.shards import Cut, Shards
from flowledger.plan.talk import Speaker, Talk

FLOAT, INT = 4, 8  # bytes of what is summed over tokens, of a count


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """One model at work on micro-batches."""

    course: Course
    role: str
    stage: str
    learns: bool
    heads: int  # numbers that a token's logits come to: log-prob and entropy; 0: a head that is not cut
    numbers: int  # numbers a token that ranks with other tokens add up

    @property
    def shards(self) -> Shards:
        return self.course.models[self.role][1]

    @property
    def layers(self) -> tuple[int, ...]:
        return self.shards.stages[self.course.on.at(self.course.rank, "pp")]

    @property
    def chunks(self) -> int:
        """Chunks of layers on this rank."""
        return self.course.config.mesh.vpp if self.course.on.degree("pp") > 1 else 1

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether this rank has the embedding's and the head's end."""
        at = self.course.on.at(self.course.rank, "pp")
        return at == 0, at == self.course.on.degree("pp") - 1

    def speaker(self, phase: str | None) -> Speaker:
        return Speaker(self.course.on, self.stage, phase)

    @property
    def mixed(self) -> int:
        """Layers of experts on this rank."""
        sizes = self.course.models[self.role][0]
        return sum(sizes.moe is not None and sizes.is_moe(layer) for layer in self.layers)

    @property
    def again(self) -> bool:
        """Whether layers are computed again in backward; each up to its last sum, after which nothing is kept."""
        return self.learns and self.course.config.actor.activation_checkpointing

    @property
    def unseen(self) -> tuple[bool, ...]:
        """Whether queries, keys and values of the first layer have no gradient: frozen embeddings, and no adapter of their own.

        Where layers are computed again transformers has the embeddings ask for one.
        """
        trained = [cut.weight.name for cut in self.shards.trained.held(self.course.rank, 0)]
        frozen = self.shards.adapted and not self.again
        return tuple(frozen and f"{one}_proj.lora_A.weight" not in trained for one in "qkv")

    def along_sequence(self) -> bool:
        """Whether norms and residuals are cut over tp."""
        return asked(self.course.config, self.role).sequence_parallel and self.course.on.degree("tp") > 1

    def tokens(self, micro: Micro) -> int:
        """Tokens of a micro-batch that go through the model on this rank."""
        return self.course.tokens(micro, self.role)


def through(passes: Passes, micro_batches: Sequence[Micro]) -> Iterator[Talk]:
    """Every collective of these micro-batches, one after another or through a pipeline."""
    forward, backward = passes.speaker("forward"), passes.speaker("backward")
    for micro, times in Counter(micro_batches).items():
        once = [*_units(passes, forward, backward)]
        for talk in (_tensor, _sequence, _experts):
            once += talk(passes, micro)
        if passes.ends[1]:
            once += _head(passes, micro)
        yield from (replace(one, count=one.count * times) for one in once)
    yield from _pipeline(passes, micro_batches)


def unit_bytes(course: Course, shards: Shards, cuts: Sequence[Cut], group: str) -> int:
    """Bytes of parameters as FSDP2 gathers them: of each, dim 0 filled up to equal pieces of what other axes leave."""
    ranks, found = shards.on.degree(group), 0
    for one in cuts:
        shape = shards.left(one, course.rank)
        found += course.itemsize_of(one.weight) * ranks * -(-shape[0] // ranks) * prod(shape[1:])
    return found


def _units(passes: Passes, forward: Speaker, backward: Speaker) -> Iterator[Talk]:
    """FSDP2: each layer is a unit, and what no layer owns another; experts that are dealt have units of their own.

    Each chunk of layers gathers what no layer owns; its gradient is reduced once a micro-batch.
    """
    course, shards = passes.course, passes.shards
    dealt = course.on.degree("ep") > 1
    for layer in (*passes.layers, None):
        cuts = shards.held(course.rank, layer)
        units = {"shards": [one for one in cuts if not (dealt and one.weight.expert)]}
        units["expert_shards"] = [one for one in cuts if dealt and one.weight.expert]
        for group, unit in units.items():
            size = unit_bytes(course, shards, unit, group)
            what = "what no layer owns" if layer is None else "a layer"
            times = passes.chunks if layer is None else 1
            if not unit:
                continue
            yield from forward.say(f"{what}, gathered", "all_gather", group, size, times)
            if passes.learns:
                yield from backward.say(f"{what}, gathered again", "all_gather", group, size, times)
                learnt = [one for one in unit if shards.trains(one.weight)]
                size = unit_bytes(course, shards, learnt, group)
                yield from backward.say(f"gradients of {what}", "reduce_scatter", group, size, int(bool(learnt)))


def _tensor(passes: Passes, micro: Micro) -> Iterator[Talk]:
    """Sums of the parts of attention and MLP, [1, T, H] each, and of the embedding's."""
    course, sizes = passes.course, passes.course.models[passes.role][0]
    if course.on.degree("tp") == 1:
        return
    size = passes.tokens(micro) * sizes.hidden * course.itemsize
    forward, backward = passes.speaker("forward"), passes.speaker("backward")
    layers, first, last = len(passes.layers), *passes.ends
    heads = 2 * layers * sizes.head_dim * course.itemsize if sizes.qk_norm == "head" else 0
    if not passes.along_sequence():
        blocks = 2 * layers - passes.mixed  # experts are whole on each rank
        yield from forward.say("parts of the embedding", "all_reduce", "tp", size, int(first))
        yield from forward.say("parts of a block", "all_reduce", "tp", size, blocks)
        if passes.learns:
            yield from backward.say("gradients of a block's input", "all_reduce", "tp", size, blocks)
            yield from backward.say("gradients of norms of heads", "all_reduce", "tp", heads, int(heads > 0))
            yield from backward.say("parts of attention, again", "all_reduce", "tp", size, layers * passes.again)
        return
    yield from forward.say("parts of the embedding", "reduce_scatter", "tp", size, int(first))
    yield from forward.say("a block's input", "all_gather", "tp", size, 2 * layers + int(last))
    yield from forward.say("parts of a block", "reduce_scatter", "tp", size, 2 * layers - passes.mixed)
    if passes.learns:
        yield from backward.say("gradients of the embedding", "all_gather", "tp", size, int(first))
        yield from backward.say("gradients of a block", "all_gather", "tp", size, 2 * layers)
        whole = passes.mixed  # what experts give is whole on each rank, and so is the gradient of what they were given
        yield from backward.say("gradients of a block's input", "reduce_scatter", "tp", size, 2 * layers - whole)
        norm = sizes.hidden * course.itemsize
        yield from backward.say(
            "gradients of norms", "all_reduce", "tp", norm, sizes.norms_per_layer * layers + int(last)
        )
        yield from backward.say("gradients of norms of heads", "all_reduce", "tp", heads, int(heads > 0))
        yield from backward.say("a block's input, again", "all_gather", "tp", size, 2 * layers * passes.again)
        yield from backward.say("parts of attention, again", "reduce_scatter", "tp", size, layers * passes.again)


def _sequence(passes: Passes, micro: Micro) -> Iterator[Talk]:
    """Ranks of cp and sp attend together: by an exchange of heads, or in a ring, or the one within the other."""
    course, sizes = passes.course, passes.course.models[passes.role][0]
    on, e = course.on, course.itemsize
    ring = on.degree("cp") > 1 and course.config.mesh.cp_kind == "ring"
    group = "sp" if ring else "tokens"
    ranks, tp, layers = Speaker(on, None).size(group), on.degree("tp"), len(passes.layers)
    heads, keys = sizes.heads // tp, sizes.kv_heads // tp
    keys *= ranks // gcd(keys, ranks)  # each rank gets equally many
    token = passes.tokens(micro) * sizes.head_dim * e
    for phase in ("forward", "backward") if passes.learns else ("forward",):
        speaker, times = passes.speaker(phase), layers * (1 + (phase == "backward" and passes.again))
        queries, *others = passes.unseen if phase == "backward" else (False, False, False)
        none = queries and all(others)
        yield from speaker.say(
            "queries, and what they found", "all_to_all", group, heads * token, 2 * times - queries - none
        )
        yield from speaker.say("keys and values", "all_to_all", group, keys * token, 2 * times - sum(others))
        if ring:
            block, hops = 2 * keys * token, on.degree("cp") - 1  # K/sp heads of sp times the tokens
            for way in ("send", "recv"):
                yield from speaker.say("keys and values, to the next", way, "cp", block, (times - none) * hops)
                if phase == "backward":
                    size, number = block // e * FLOAT, (layers - none) * (hops + 1)
                    yield from speaker.say("their gradients", way, "cp", size, number)
    if passes.ends[1]:
        numbers = len(micro) * course.response * FLOAT
        yield from passes.speaker("forward").say(
            "numbers of all tokens", "all_reduce", "tokens", numbers, passes.numbers
        )


def _experts(passes: Passes, micro: Micro) -> Iterator[Talk]:
    """Copies of tokens to their experts and back. What arrives depends on the router; planned as evenly as it can be."""
    moe, sizes = passes.course.models[passes.role][0].moe, passes.course.models[passes.role][0]
    if moe is None:
        return
    copies = passes.tokens(micro) * moe.topk * sizes.hidden * passes.course.itemsize
    for phase in ("forward", "backward") if passes.learns else ("forward",):
        speaker, again = passes.speaker(phase), phase == "backward" and passes.again
        asked = passes.mixed * (phase == "forward" or again)
        yield from speaker.say("how many for each expert", "all_to_all", "ep", moe.experts * INT, asked)
        yield from speaker.say(
            "copies of tokens, there and back", "all_to_all", "ep", copies, 2 * passes.mixed * (1 + again)
        )


def _head(passes: Passes, micro: Micro) -> Iterator[Talk]:
    """A vocabulary that is cut: [T_logit] numbers each. In backward one sum of them, and one of the states' gradients.

    Several chunks are computed again in backward, as far as something was kept of it: to the softmax, where entropy has
    a gradient also to the one logit.
    """
    course, wanted = passes.course, passes.course.wanted(micro, passes.role)
    if not passes.heads or course.on.degree("tp") == 1:
        return
    chunk = course.config.actor.log_prob_chunk_tokens or max(wanted, 1)
    forward, backward = passes.speaker("forward"), passes.speaker("backward")
    hidden = course.models[passes.role][0].hidden * course.itemsize
    for start in range(0, max(wanted, 1), chunk):
        rows = min(chunk, wanted - start)
        yield from forward.say("numbers of a token's logits", "all_reduce", "tp", rows * FLOAT, 2 + passes.heads)
        if passes.learns:
            again = 2 + (course.config.algorithm.entropy_coef != 0) if chunk < wanted else 0
            yield from backward.say("numbers of a token's logits", "all_reduce", "tp", rows * FLOAT, 1 + again)
            yield from backward.say("gradients of the head's input", "all_reduce", "tp", rows * hidden, 1)


def _pipeline(passes: Passes, micro_batches: Sequence[Micro]) -> Iterator[Talk]:
    """Hidden states [N, H] from chunk to chunk, N those of the longest micro-batch, and their gradients back."""
    course, pp = passes.course, passes.course.on.degree("pp")
    if pp == 1 or not micro_batches:
        return
    at, last = course.on.at(course.rank, "pp"), pp * passes.chunks - 1
    mine = range(at, last + 1, pp)
    after, before = sum(chunk < last for chunk in mine), sum(chunk > 0 for chunk in mine)
    tokens = max(passes.tokens(micro) for micro in micro_batches)
    rows = tokens // course.on.degree("tp") if passes.along_sequence() else tokens
    size, number = rows * course.models[passes.role][0].hidden * course.itemsize, len(micro_batches)
    forward, backward, outside = (passes.speaker(phase) for phase in ("forward", "backward", None))
    yield from forward.say("hidden states", "send", "pp", size, after * number)
    yield from forward.say("hidden states", "recv", "pp", size, before * number)
    if passes.learns:
        yield from backward.say("their gradients", "send", "pp", size, before * number)
        yield from backward.say("their gradients", "recv", "pp", size, after * number)
    for way in ("send", "recv"):  # torch asks every stage whether shapes are known: there, and the answer back
        yield from outside.say("whether shapes are known", way, "pp", FLOAT, after + before)


def rounds(micro_batches: Sequence[Micro], course: Course, role: str) -> list[Micro]:
    """The micro-batches, and empty ones where an interleaved schedule takes rounds of equally many."""
    number, pp = len(micro_batches), course.on.degree("pp")
    if asked(course.config, role).pipeline == "interleaved" and pp > 1:
        while number % max(1, number // pp):
            number += 1
    return [*micro_batches, *[()] * (number - len(micro_batches))]
