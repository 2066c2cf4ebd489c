-- Every view that people look at. Row types stay behind them.
-- Conventions: `source` is kept in every view (a plan and a recording stand side by side); shapes are lists; bytes are
-- integers; what nobody saw is null.

-- ---------------------------------------------------------------------------------------------------- small algebra

CREATE MACRO shape_max(shape) AS list_slice(
    [max(shape[1]), max(shape[2]), max(shape[3]), max(shape[4]), max(shape[5]), max(shape[6])], 1, max(len(shape)));
CREATE MACRO shape_min(shape) AS list_slice(
    [min(shape[1]), min(shape[2]), min(shape[3]), min(shape[4]), min(shape[5]), min(shape[6])], 1, max(len(shape)));

-- A mask covers a tensor when it lines up with its last dims, or with its first ones (then it repeats along the rest).
CREATE MACRO mask_fits(mask, shape) AS len(mask) <= len(shape) AND (
    len(list_filter(range(1, len(mask) + 1), lambda i: mask[-i] NOT IN (1, shape[-i]))) = 0
    OR len(list_filter(range(1, len(mask) + 1), lambda i: mask[i] NOT IN (1, shape[i]))) = 0);

CREATE MACRO place(stage, phase) AS stage || coalesce('/' || phase, '');

CREATE MACRO phase_position(phase) AS coalesce(list_position(
    ['load', 'forward', 'loss', 'backward', 'step', 'offload'], phase), 0);

-- ------------------------------------------------------------------------------------------------------------ spans

-- One row an interval. An interval whose end nobody wrote (a crash) stays open: end_ns and latency_ms are null.
CREATE VIEW spans_view AS
SELECT run, source, process, id, parent, name, span_kind, step, role, stage, phase, rank, epoch, mini_batch, micro_batch, policy_version,
    start_ns, end_ns, coalesce(latency_ms, (end_ns - start_ns) / 1e6) AS latency_ms, device_ms, comm_type, "group", peer_ranks, bytes,
    tokens_logical, tokens_valid, tokens_computed, sample_id
FROM spans WHERE event = 'whole'
UNION ALL
SELECT run, source, process, id, any_value(parent), any_value(name), any_value(span_kind), any_value(step), any_value(role),
    any_value(stage), any_value(phase), any_value(rank), any_value(epoch), any_value(mini_batch), any_value(micro_batch),
    any_value(policy_version), min(start_ns), max(end_ns), coalesce(max(latency_ms), (max(end_ns) - min(start_ns)) / 1e6),
    max(device_ms), any_value(comm_type), any_value("group"), any_value(peer_ranks), max(bytes), max(tokens_logical),
    max(tokens_valid), max(tokens_computed), any_value(sample_id)
FROM spans WHERE event IS DISTINCT FROM 'whole' GROUP BY run, source, process, id;

-- --------------------------------------------------------------------------------------------------------- meetings

CREATE VIEW clocks AS SELECT process, coalesce(wall_ns - monotonic_ns, 0) AS apart FROM processes;

-- Times of all processes on one clock; `heard_ns`: when anything of the run was heard last.
CREATE VIEW clocked AS
SELECT spans.run, spans.source, spans.process, id, spans.rank, event, span_kind, stage,
    start_ns + apart AS started_ns, end_ns + apart AS ended_ns, max(t_ns + apart) OVER (PARTITION BY spans.run, spans.source) AS heard_ns
FROM spans JOIN clocks USING (process)
WHERE spans.source <> 'plan' AND spans.rank IS NOT NULL;

-- Ranks meet in the n-th collective of theirs, a sender and a receiver in the n-th message from one to the other.
CREATE VIEW meetings AS
WITH collectives AS (
    SELECT run, source, process, rank, id, step, stage, phase, mini_batch, micro_batch, comm_type, "group", peer_ranks,
        start_ns, end_ns, list_filter(peer_ranks, lambda one: one <> rank) AS peers,
        CASE WHEN starts_with(comm_type, 'send') THEN concat(rank, '>', peers[1]) WHEN starts_with(comm_type, 'recv') THEN concat(peers[1], '>', rank)
            ELSE array_to_string(list_sort(peer_ranks), ',') END AS parties
    FROM spans_view WHERE span_kind = 'comm' AND source <> 'plan' AND rank IS NOT NULL AND peer_ranks IS NOT NULL)
SELECT *, row_number() OVER (PARTITION BY run, source, process, parties ORDER BY id) AS nth
FROM collectives WHERE len(peers) > 0 AND (NOT contains(parties, '>') OR len(peers) = 1);

-- How long each rank waited in a collective until its last rank came, clipped to its own end: who sends may go on before. What
-- an earlier wait of the process covers is left out, so that seconds add up. Only where every rank's part was recorded.
CREATE VIEW waits AS
WITH arrivals AS (
    SELECT * EXCLUDE (start_ns, end_ns, apart), start_ns + apart AS arrived_ns, end_ns + apart AS left_ns FROM meetings JOIN clocks USING (process)),
met AS (
    SELECT run, source, parties, nth, max(arrived_ns) AS met_ns, arg_max(rank, arrived_ns) AS last_rank, arg_max(process, arrived_ns) AS last_process
    FROM arrivals GROUP BY run, source, parties, nth
    HAVING count(*) = max(len(peers)) + 1 AND count(DISTINCT rank) = count(*) AND (contains(parties, '>') OR count(DISTINCT comm_type) = 1))
SELECT run, source, process, rank, id, step, stage, phase, mini_batch, micro_batch, comm_type, "group", peer_ranks, parties, nth,
    least(met_ns, left_ns) AS until_ns, greatest(until_ns - greatest(arrived_ns, max(least(met_ns, left_ns)) OVER (
        PARTITION BY run, source, process ORDER BY arrived_ns, id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)), 0) / 1e9 AS seconds,
    last_rank, last_process, (arrived_ns + until_ns) // 2 AS middle_ns
FROM arrivals JOIN met USING (run, source, parties, nth);

-- The waits that took time, and `last_stage`: where the last rank was in the middle of each.
CREATE VIEW waited AS
WITH places AS (
    SELECT run, source, process AS last_process, stage AS last_stage, start_ns + apart AS middle_ns, end_ns + apart AS gone_ns
    FROM spans_view JOIN clocks USING (process) WHERE span_kind = 'stage')
SELECT waits.* EXCLUDE (until_ns, last_process, middle_ns), CASE WHEN coalesce(gone_ns >= waits.middle_ns, true) THEN last_stage END AS last_stage
FROM (FROM waits WHERE seconds > 0) AS waits ASOF LEFT JOIN places USING (run, source, last_process, middle_ns);

CREATE VIEW waited_by_stage AS
WITH parts AS (
    SELECT run, source, process, step, stage, last_rank, sum(seconds) AS seconds FROM waits GROUP BY run, source, process, step, stage, last_rank)
SELECT run, source, process, step, stage, sum(seconds) AS waited_seconds, arg_max(last_rank, seconds) FILTER (seconds > 0) AS waited_for
FROM parts GROUP BY run, source, process, step, stage;

-- ----------------------------------------------------------------------------------------------------------- stages

CREATE VIEW step_seconds AS
WITH whole AS (
    SELECT run, source, step, max(latency_ms) / 1e3 AS seconds FROM spans_view
    WHERE step IS NOT NULL AND stage IS NULL AND span_kind <> 'comm' AND name IN ('step', 'rl_step')
    GROUP BY run, source, step),
parts AS (
    SELECT run, source, step, sum(latency_ms) / 1e3 AS seconds FROM spans_view
    WHERE step IS NOT NULL AND span_kind = 'stage' AND stage IS NOT NULL GROUP BY run, source, step)
SELECT run, source, step, coalesce(whole.seconds, parts.seconds) AS seconds
FROM parts FULL JOIN whole USING (run, source, step);

-- Which step each process went through, and whether to its end.
CREATE VIEW walked AS
SELECT run, source, process, processes.role, processes.rank, step, end_ns IS NOT NULL AS closed
FROM spans_view JOIN (SELECT process, role, rank FROM processes) AS processes USING (process)
WHERE step IS NOT NULL AND stage IS NULL AND span_kind <> 'comm' AND name IN ('step', 'rl_step') AND source <> 'plan';

-- Steps that not every rank went through to the end: one did not come to them, died in them or waits there, or an exception
-- broke them off. What was recorded of them is not all there is.
CREATE VIEW cut_steps AS
SELECT run, source, step FROM walked
GROUP BY run, source, step
HAVING count(DISTINCT (role, rank)) FILTER (closed) < (SELECT count(DISTINCT (role, rank)) FROM processes
        WHERE source <> 'plan' AND role IN (SELECT role FROM walked))
    OR step IN (SELECT step FROM findings WHERE id = 'call_failed')
ORDER BY step;

-- One reading a row: the kinds side by side, what the allocator says, and what no kind explains.
CREATE VIEW memory_readings AS
WITH wide AS (
    SELECT run, source, process, any_value(rank) AS rank, step, stage, phase, epoch, mini_batch, micro_batch, instant,
        max(t_ns) AS t_ns,
        max(allocated) FILTER (kind = 'param') AS param, max(allocated) FILTER (kind = 'grad') AS grad,
        max(allocated) FILTER (kind = 'optimizer') AS optimizer, max(allocated) FILTER (kind = 'activation') AS activation,
        max(allocated) FILTER (kind = 'kv_cache') AS kv_cache, max(allocated) FILTER (kind = 'comm_buffer') AS comm_buffer,
        max(allocated) FILTER (kind = 'temporary') AS temporary, max(allocated) FILTER (kind = 'batch') AS batch,
        max(allocated) FILTER (kind = 'residue') AS stated_residue,
        max(allocated) FILTER (kind = 'total') AS allocated, max(reserved) FILTER (kind = 'total') AS reserved,
        max(peak_since_stage) FILTER (kind = 'total') AS peak_since_stage,
        max(reserved_peak_since_stage) FILTER (kind = 'total') AS reserved_peak_since_stage, max("limit") AS "limit",
        max(device_used) AS device_used, max(host_used) AS host_used,
        max(fragmentation) FILTER (kind = 'total') AS stated_fragmentation
    FROM memory
    GROUP BY run, source, process, step, stage, phase, epoch, mini_batch, micro_batch, instant),
explained AS (
    SELECT *, CASE WHEN coalesce(param, grad, optimizer, activation, kv_cache, comm_buffer, temporary, batch) IS NOT NULL
        THEN TRY_CAST(coalesce(param, 0)::HUGEINT + coalesce(grad, 0) + coalesce(optimizer, 0) + coalesce(activation, 0)
            + coalesce(kv_cache, 0) + coalesce(comm_buffer, 0) + coalesce(temporary, 0) + coalesce(batch, 0) AS BIGINT) END AS known
    FROM wide)
SELECT run, source, process, rank, step, stage, phase, epoch, mini_batch, micro_batch, instant, t_ns, param, grad,
    optimizer, activation, kv_cache, comm_buffer, temporary, batch, coalesce(allocated - known, stated_residue) AS residue,
    known, allocated, reserved, peak_since_stage, reserved_peak_since_stage, device_used, host_used, "limit",
    coalesce(stated_fragmentation, 1 - allocated / nullif(reserved, 0)) AS fragmentation
FROM explained;

-- Processes that stand first on every axis whose ranks work on the same samples: their tokens, added up, are the batch's.
CREATE VIEW first_of_replica AS
SELECT process FROM processes WHERE coalesce(list_sum(list_transform(['tp', 'pp', 'cp', 'sp'], lambda axis: coalesce(coordinates[axis], 0))), 0) = 0;

-- What each process spent in a stage itself: where stages lie inside of others or overlap, the one that began last has the time.
CREATE VIEW own_seconds AS
WITH whole AS (
    SELECT run, source, process, step, role, stage, id, start_ns, end_ns FROM spans_view
    WHERE span_kind = 'stage' AND stage IS NOT NULL AND step IS NOT NULL AND end_ns IS NOT NULL),
moments AS (
    SELECT DISTINCT run, source, process, step, unnest([start_ns, end_ns]) AS from_ns FROM whole),
pieces AS (
    SELECT *, lead(from_ns) OVER (PARTITION BY run, source, process, step ORDER BY from_ns) AS to_ns FROM moments),
shares AS (
    SELECT run, source, process, step, arg_max({'role': role, 'stage': stage}, (start_ns, id)) AS own, any_value(to_ns - from_ns) AS ns
    FROM pieces JOIN whole USING (run, source, process, step) WHERE start_ns <= from_ns AND end_ns >= to_ns
    GROUP BY run, source, process, step, from_ns)
SELECT run, source, process, step, own.role AS role, own.stage AS stage, sum(ns) / 1e9 AS seconds
FROM shares GROUP BY ALL;

-- Of all ranks' time in a step the part that each stage had: no more than all of it together.
CREATE VIEW stage_shares AS
WITH whole AS (
    SELECT run, source, process, step, max(latency_ms) / 1e3 AS seconds FROM spans_view
    WHERE stage IS NULL AND span_kind <> 'comm' AND name IN ('step', 'rl_step') GROUP BY run, source, process, step),
there AS (
    SELECT run, source, process, step, sum(seconds) AS known FROM own_seconds GROUP BY run, source, process, step),
longest AS (SELECT run, source, step, max(seconds) AS seconds FROM whole GROUP BY run, source, step),
spent AS (  -- a process that records no steps of its own is there for those of the run
    SELECT run, source, step, sum(greatest(coalesce(whole.seconds, longest.seconds), known)) AS seconds
    FROM there LEFT JOIN whole USING (run, source, process, step) LEFT JOIN longest USING (run, source, step)
    GROUP BY run, source, step)
SELECT run, source, step, role, stage, sum(own_seconds.seconds) / nullif(any_value(spent.seconds), 0) AS share
FROM own_seconds JOIN spent USING (run, source, step) GROUP BY run, source, step, role, stage;

-- Of several ranks the longest time counts. The slowest, by name and with what it waited, is the one that worked longest: its time
-- less its waits; of equals who waited less, then the lowest rank. Tokens stand at the span that knows them: the stage's own, else
-- the sum over the spans inside it.
CREATE VIEW stages AS
WITH per_process AS (
    SELECT run, source, process, any_value(rank) AS rank, step, role, stage,
        sum(latency_ms) FILTER (span_kind = 'stage') / 1e3 AS seconds,
        count(*) FILTER (span_kind = 'stage') AS calls,
        count(*) FILTER (span_kind = 'stage' AND end_ns IS NULL) AS open_calls,
        coalesce(sum(tokens_logical) FILTER (span_kind = 'stage'), sum(tokens_logical)) AS tokens_logical,
        coalesce(sum(tokens_valid) FILTER (span_kind = 'stage'), sum(tokens_valid)) AS tokens_valid,
        coalesce(sum(tokens_computed) FILTER (span_kind = 'stage'), sum(tokens_computed)) AS tokens_computed
    FROM spans_view WHERE stage IS NOT NULL
    GROUP BY run, source, process, step, role, stage),
merged AS (
    SELECT run, source, step, role, stage, max(seconds) AS seconds, max(calls) AS calls, max(open_calls) AS open_calls,
        CASE WHEN count(DISTINCT rank) > 1 THEN arg_max({'rank': rank, 'waited': waited_seconds},
            row(seconds - coalesce(waited_seconds, 0), -coalesce(waited_seconds, 0), -rank)) FILTER (seconds IS NOT NULL AND rank IS NOT NULL)
        END AS slowest,
        (sum(tokens_logical) FILTER (counts))::BIGINT AS tokens_logical, (sum(tokens_valid) FILTER (counts))::BIGINT AS tokens_valid,
        (sum(tokens_computed) FILTER (counts))::BIGINT AS tokens_computed
    FROM (SELECT per_process.*, waited_seconds, coalesce(stage_mesh = 'rollout', false) OR source = 'plan' OR process NOT IN (SELECT process FROM processes)
        OR process IN (FROM first_of_replica) AS counts
        FROM per_process LEFT JOIN flow_stages USING (stage) LEFT JOIN waited_by_stage USING (run, source, process, step, stage))
    GROUP BY run, source, step, role, stage HAVING max(calls) > 0),
boundaries AS (
    SELECT run, source, step, stage, max(greatest(peak_since_stage, allocated)) AS peak,
        max(residue) AS residue, max(known) FILTER (instant = 'peak') AS live
    FROM memory_readings GROUP BY run, source, step, stage),
-- Between boundaries the allocator is not asked; on watched steps live tensors are, and the residue stands beside them.
peaks_of_stages AS (
    SELECT run, source, step, stage,
        greatest(peak, live + max(residue) OVER (PARTITION BY run, source, step))::BIGINT AS peak FROM boundaries)
SELECT merged.run, merged.source, merged.step, merged.stage, merged.role, merged.calls, merged.open_calls,
    merged.seconds, share, slowest.rank AS slowest_rank,
    slowest.waited AS waited_seconds, tokens_logical, tokens_valid,
    tokens_computed, CASE WHEN tokens_computed IS NOT NULL THEN tokens_valid / nullif(merged.seconds, 0) END AS tokens_per_s, peak AS peak_bytes
FROM merged
LEFT JOIN stage_shares ON merged.run = stage_shares.run AND merged.source = stage_shares.source AND merged.step = stage_shares.step
    AND merged.role IS NOT DISTINCT FROM stage_shares.role AND merged.stage = stage_shares.stage
LEFT JOIN peaks_of_stages ON merged.run = peaks_of_stages.run AND merged.source = peaks_of_stages.source
    AND merged.step IS NOT DISTINCT FROM peaks_of_stages.step AND merged.stage = peaks_of_stages.stage
LEFT JOIN flow_stages ON merged.stage = flow_stages.stage
ORDER BY merged.step, flow_stages.position NULLS LAST, merged.stage, merged.role;

CREATE VIEW phases AS
WITH per_process AS (
    SELECT run, source, process, step, role, stage, phase, sum(latency_ms) / 1e3 AS seconds, count(*) AS calls
    FROM spans_view WHERE stage IS NOT NULL AND phase IS NOT NULL AND span_kind IN ('compute', 'stage')
    GROUP BY run, source, process, step, role, stage, phase)
SELECT run, source, step, stage, role, phase, max(seconds) AS seconds, max(calls) AS calls
FROM per_process GROUP BY run, source, step, stage, role, phase
ORDER BY step, stage, phase_position(phase);

-- ----------------------------------------------------------------------------------------------------------- shapes

-- One row an access, with its logical shape: what was observed, else the local shape where no axis cuts it.
CREATE VIEW accesses AS
SELECT tensors.* EXCLUDE (logical_shape, dims), trim(dims, '[] ') AS dims,
    coalesce(logical_shape, CASE WHEN NOT list_contains(list_transform(coalesce(placement, []),
        lambda p: contains(p, 'Shard')), true) THEN local_shape END) AS logical_shape
FROM tensors;

-- `mask_fits` is null where the mask lies over other positions by design: packed tensors against a padded mask, and the
-- response mask, which is the tail of the attention mask.
-- The shape ledger. Layers, steps and micro-batches are collapsed: the shapes are the largest, `*_min` the smallest seen.
CREATE MACRO shapes_at(which_step) AS TABLE
WITH grouped AS (
    SELECT run, source, role, stage, phase, tensor_name, dims, len(coalesce(logical_shape, local_shape)) AS ndim,
        shape_max(logical_shape) AS logical_shape, shape_min(logical_shape) AS logical_shape_min,
        shape_max(local_shape) AS local_shape, shape_min(local_shape) AS local_shape_min,
        any_value(placement) AS placement, any_value(mask) AS mask, any_value(broadcast) AS broadcast,
        shape_max(mask_shape) AS mask_shape, shape_min(mask_shape) AS mask_shape_min,
        bool_and(mask_fits(mask_shape, coalesce(local_shape, logical_shape))) AS fits,
        avg(mask_ratio) AS mask_ratio, any_value(owner_rank) AS owner_rank, any_value(owner) AS owner,
        any_value(lifetime) AS lifetime, any_value(padding) AS padding, any_value(kind) AS kind,
        string_agg(DISTINCT dtype, ', ' ORDER BY dtype) AS dtype, max(numel) AS numel, max(bytes) AS bytes,
        string_agg(DISTINCT access, '+' ORDER BY access) AS access, bool_or(access = 'read') AS is_read,
        count(DISTINCT layer) AS layers, count(DISTINCT rank) AS ranks, count(*) AS accesses
    FROM accesses WHERE which_step IS NULL OR step = which_step
    GROUP BY run, source, role, stage, phase, tensor_name, dims, ndim)
SELECT run, source, role, grouped.stage, phase, grouped.tensor_name, grouped.dims, logical_shape, logical_shape_min,
    local_shape, local_shape_min, coalesce(mask, flow_mask) AS mask, coalesce(grouped.broadcast, flow_broadcast) AS broadcast,
    owner_rank, coalesce(lifetime, flow_lifetime) AS lifetime, common_bug, common_bug_zh, mask_shape, mask_shape_min,
    CASE WHEN coalesce(padding, flow_padding) = 'packed' OR (mask = 'attention_mask' AND grouped.tensor_name = 'response_mask')
        THEN NULL ELSE fits END AS mask_fits, mask_ratio, nullif(coalesce(padding, flow_padding), 'none') AS padding, coalesce(kind, flow_kind) AS kind, dtype, numel,
    bytes, access, placement, coalesce(owner, flow_owner) AS owner, layers, ranks, accesses
FROM grouped
LEFT JOIN flow_tensors ON grouped.tensor_name = flow_tensors.tensor_name
LEFT JOIN flow_forms ON grouped.tensor_name = flow_forms.tensor_name AND grouped.dims = flow_forms.dims
LEFT JOIN flow_stages ON grouped.stage = flow_stages.stage
ORDER BY flow_stages.position NULLS LAST, grouped.stage, role, phase_position(phase), is_read DESC,
    flow_tensors.position NULLS LAST, grouped.tensor_name, grouped.dims, ndim, source;

CREATE VIEW shapes AS FROM shapes_at(NULL);

-- ----------------------------------------------------------------------------------------------------------- memory

-- The memory ledger: of several readings of one instant in one stage (micro-batches), the fullest.
CREATE VIEW memory_by_stage AS
SELECT memory_readings.* FROM memory_readings LEFT JOIN flow_stages USING (stage)
QUALIFY row_number() OVER (PARTITION BY run, source, process, step, stage, phase, instant ORDER BY coalesce(allocated, known) DESC NULLS LAST, t_ns, epoch, mini_batch, micro_batch) = 1
ORDER BY step, flow_stages.position NULLS LAST, phase IS NULL, phase_position(phase), instant = 'end', t_ns, process, instant;

-- The peak of each step: where live tensors were watched, their fullest moment; else the fullest reading of the allocator.
CREATE VIEW peaks AS
SELECT * EXCLUDE (peak_since_stage), CASE WHEN instant = 'peak' THEN coalesce(allocated, known) ELSE allocated END AS peak
FROM memory_readings WHERE CASE WHEN instant = 'peak' THEN coalesce(allocated, known) ELSE allocated END IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY run, source, process, step
    ORDER BY instant = 'peak' DESC, peak DESC, known DESC NULLS LAST, t_ns, stage, phase, epoch, mini_batch, micro_batch, instant) = 1
ORDER BY step, process;

-- -------------------------------------------------------------------------------------------------------- lifetimes

-- One row a tensor and storage: made where, read by whom, freed where, and what the flow had declared.
CREATE VIEW lifetimes AS
WITH uses AS (
    SELECT run, source, process, storage, tensor_name, any_value(role) AS role, any_value(rank) AS rank,
        any_value(dims) AS dims, any_value(kind) AS kind, any_value(lifetime) AS lifetime, max(bytes) AS bytes,
        min(step) AS step, any_value(layer) AS layer,
        arg_min(stage, seq) FILTER (access = 'write') AS write_stage, arg_min(phase, seq) FILTER (access = 'write') AS write_phase,
        arg_min(stage, seq) AS first_stage, arg_min(phase, seq) AS first_phase, min(t_ns) AS first_ns,
        list_filter((SELECT list(stage ORDER BY position) FROM flow_stages),
            lambda one: list_contains(list(stage) FILTER (access = 'read'), one)) AS readers,
        arg_max(stage, seq) FILTER (access = 'read') AS last_read_stage, arg_max(phase, seq) FILTER (access = 'read') AS last_read_phase
    FROM accesses WHERE storage IS NOT NULL
    GROUP BY run, source, process, storage, tensor_name),
events AS (
    SELECT run, source, process, storage, max(bytes) AS storage_bytes, any_value(kind) AS storage_kind, min(step) AS event_step,
        any_value(role) AS event_role, any_value(rank) AS event_rank,
        arg_min(stage, seq) FILTER (event = 'born') AS born_stage, arg_min(phase, seq) FILTER (event = 'born') AS born_phase,
        min(t_ns) FILTER (event = 'born') AS born_ns, max(t_ns) FILTER (event = 'freed') AS freed_ns,
        bool_or(event = 'freed') AS is_freed, max(step) FILTER (event = 'freed') AS freed_step,
        arg_max(stage, seq) FILTER (event = 'freed') AS freed_stage, arg_max(phase, seq) FILTER (event = 'freed') AS freed_phase,
        arg_max(stage, seq) FILTER (event = 'last_read') AS seen_read_stage, arg_max(phase, seq) FILTER (event = 'last_read') AS seen_read_phase,
        arg_max(holder, seq) FILTER (event = 'held') AS holder
    FROM storages GROUP BY run, source, process, storage),
joined AS (
    SELECT run, source, process, storage, tensor_name, coalesce(role, event_role) AS role, coalesce(rank, event_rank) AS rank,
        coalesce(step, event_step) AS step, dims, layer, coalesce(storage_kind, kind) AS kind, coalesce(storage_bytes, bytes) AS bytes,
        CASE WHEN born_stage IS NOT NULL THEN place(born_stage, born_phase) WHEN write_stage IS NOT NULL THEN place(write_stage, write_phase)
            WHEN first_stage IS NOT NULL THEN place(first_stage, first_phase) END AS born_at,
        coalesce(readers, []) AS readers,
        CASE WHEN last_read_stage IS NOT NULL THEN place(last_read_stage, last_read_phase)
            WHEN seen_read_stage IS NOT NULL THEN place(seen_read_stage, seen_read_phase) END AS last_read_at,
        CASE WHEN freed_stage IS NOT NULL THEN place(freed_stage, freed_phase) WHEN is_freed THEN 'after the step' END AS freed_at,
        coalesce(is_freed, false) AS is_freed, freed_step, freed_stage, freed_phase, holder, lifetime,
        coalesce(born_ns, first_ns) AS born_ns, freed_ns, storage_bytes IS NOT NULL AS was_watched
    FROM uses FULL JOIN events USING (run, source, process, storage)),
-- A tensor that several stages make for themselves is due in the stage that made it.
judged AS (
    SELECT joined.*, flow_kind, flow_lifetime, coalesce(list_filter(also_freed_by,
        lambda place: split_part(place, '/', 1) = split_part(born_at, '/', 1))[1], flow_tensors.freed_by) AS freed_by
    FROM joined LEFT JOIN flow_tensors ON joined.tensor_name = flow_tensors.tensor_name)
SELECT judged.run, judged.source, process, judged.storage, judged.tensor_name, role, rank, step, judged.dims, layer,
    coalesce(judged.kind, flow_kind) AS kind, bytes, born_at, judged.readers, last_read_at, freed_at, freed_step,
    freed_by AS declared_freed_by, coalesce(lifetime, flow_lifetime) AS lifetime, holder,
    CASE
        WHEN coalesce(lifetime, flow_lifetime) = 'persistent' OR freed_by = 'never' THEN false
        WHEN holder IS NOT NULL THEN true
        WHEN NOT is_freed OR freed_by IS NULL THEN NULL
        WHEN freed_step > step THEN true
        WHEN freed_stage IS NULL THEN NULL
        ELSE coalesce(freed.position > due.position OR (freed.position = due.position AND contains(freed_by, '/')
            AND phase_position(freed_phase) > phase_position(split_part(freed_by, '/', 2))), false)
    END AS outlives,
    (freed_ns - born_ns) / 1e6 AS alive_ms
FROM judged
LEFT JOIN flow_stages AS freed ON freed.stage = judged.freed_stage
LEFT JOIN flow_stages AS due ON due.stage = split_part(freed_by, '/', 1)
ORDER BY step, born_ns;

-- The lifetime table: storages, layers, steps and micro-batches with one and the same fate on one line.
CREATE MACRO lifetimes_at(which_step) AS TABLE
SELECT run, source, role, lifetimes.tensor_name, kind, born_at, lifetimes.readers, last_read_at, freed_at, declared_freed_by,
    lifetime, holder, outlives, count(*) AS storages, max(bytes) AS bytes, sum(bytes)::BIGINT AS total_bytes,
    avg(alive_ms) AS alive_ms, min(step) AS first_step, max(step) AS last_step
FROM lifetimes LEFT JOIN flow_tensors USING (tensor_name) LEFT JOIN flow_stages ON flow_stages.stage = split_part(born_at, '/', 1)
WHERE which_step IS NULL OR step = which_step
GROUP BY run, source, role, lifetimes.tensor_name, kind, born_at, lifetimes.readers, last_read_at, freed_at, declared_freed_by,
    lifetime, holder, outlives, flow_stages.position, flow_tensors.position
ORDER BY flow_stages.position NULLS FIRST, born_at, flow_tensors.position NULLS LAST, bytes DESC, lifetimes.tensor_name, role, freed_at,
    last_read_at, holder, source, lifetimes.readers;

CREATE VIEW lifetime_table AS FROM lifetimes_at(NULL);

-- ---------------------------------------------------------------------------------------------------------- metrics

-- When each step began, on one clock. An engine beside the trainer is told of no step: what it does belongs to the one that began last.
CREATE VIEW step_begins AS
SELECT run, source, step, min(start_ns + apart) AS began_ns FROM spans_view JOIN clocks USING (process)
WHERE step IS NOT NULL AND stage IS NULL AND span_kind <> 'comm' AND name IN ('step', 'rl_step') GROUP BY run, source, step;

-- What became of each request that an inference engine was given. `cached_tokens` of the prompt were not computed; null where it was
-- never scheduled.
CREATE VIEW requests AS
SELECT whole.run, whole.source, whole.process, coalesce(whole.step, begun.step) AS step, whole.policy_version, whole.sample_id AS request,
    split_part(whole.name, '/', 2) AS finish_reason, queued.tokens_valid AS prompt_tokens,
    queued.tokens_valid - queued.tokens_computed AS cached_tokens, whole.tokens_valid AS response_tokens,
    queued.latency_ms / 1e3 AS queued_seconds, whole.latency_ms / 1e3 AS seconds, whole.start_ns
FROM spans_view AS whole JOIN spans_view AS queued
    ON queued.run = whole.run AND queued.source = whole.source AND queued.process = whole.process AND queued.parent = whole.id AND queued.name = 'queued'
JOIN clocks ON clocks.process = whole.process ASOF LEFT JOIN step_begins AS begun
    ON whole.run = begun.run AND whole.source = begun.source AND whole.end_ns + apart >= began_ns
WHERE starts_with(whole.name, 'request/')
ORDER BY whole.process, whole.start_ns, whole.id;

-- What each process has for itself, so that the run has the sum; any other number all processes have alike.
CREATE MACRO is_share(name) AS name IN ('rollout/running', 'rollout/waiting') OR (starts_with(name, 'recorder/') AND name <> 'recorder/ns_per_row');

-- What is counted wherever it happens: rows add up, in a process and over all.
CREATE MACRO is_count(name) AS name IN ('rollout/engine_steps', 'rollout/prefill_tokens', 'rollout/decode_tokens', 'rollout/cached_tokens',
    'rollout/preemptions') OR starts_with(name, 'rollout/finished/');

-- Every number with its step: what an engine says of itself is told of none.
CREATE VIEW metrics_placed AS
SELECT metrics.* FROM metrics WHERE step IS NOT NULL OR NOT starts_with(name, 'rollout/')
UNION ALL
SELECT metrics.* REPLACE (begun.step AS step)
FROM metrics LEFT JOIN clocks USING (process) ASOF LEFT JOIN step_begins AS begun
    ON metrics.run = begun.run AND metrics.source = begun.source AND metrics.t_ns + apart >= began_ns
WHERE metrics.step IS NULL AND starts_with(name, 'rollout/');

-- One number a step: the mean by weight, of a share times the processes that have one; where one has fewer decode steps than
-- another, it runs nothing in the rest. A special value (nan, inf) wins, for it must not vanish.
CREATE VIEW metrics_by_step AS
WITH per_process AS (
    SELECT run, source, process, step, name, any_value(raw_name) AS raw_name, sum(value * coalesce(weight, 1)) AS total,
        sum(coalesce(weight, 1)) FILTER (value IS NOT NULL) AS weight, any_value(special) AS special,
        bool_and(recomputed) AS recomputed, any_value(stage) AS stage
    FROM metrics_placed GROUP BY run, source, process, step, name)
SELECT run, source, step, name, any_value(raw_name) AS raw_name,
    CASE WHEN count(special) = 0 THEN sum(total) / nullif(CASE WHEN is_count(name) THEN 1 WHEN is_share(name) THEN max(weight) ELSE sum(weight) END, 0) END AS value,
    any_value(special) AS special, bool_and(recomputed) AS recomputed, any_value(stage) AS stage
FROM per_process GROUP BY run, source, step, name
ORDER BY step, name;

-- --------------------------------------------------------------------------------------------------------- samples

-- What was said last, by time and then by number of row, as one number: an ordered aggregate takes half as long again.
CREATE MACRO latest(value, t, n) AS arg_max(value, coalesce(t, 0)::HUGEINT * 1000000000000 + coalesce(n, 0));

-- `trained_in`: the step that learnt of it first; a later one than `step` where a run samples ahead.
CREATE VIEW samples_merged AS
SELECT run, source, sample_id, attempt, min(step) AS step, min(step) FILTER (len(trained) > 0) AS trained_in,
    latest(group_id, t_ns, seq) AS group_id,
    latest(versions, t_ns, seq) AS versions,
    latest(prompt_length, t_ns, seq) AS prompt_length,
    latest(response_length, t_ns, seq) AS response_length,
    latest(finish_reason, t_ns, seq) AS finish_reason,
    latest(rewards, t_ns, seq) AS rewards,
    latest(reward, t_ns, seq) AS reward,
    latest(advantage, t_ns, seq) AS advantage,
    latest(trained, t_ns, seq) AS trained,
    latest(dropped_reason, t_ns, seq) AS dropped_reason
FROM samples GROUP BY run, source, sample_id, attempt
ORDER BY step, TRY_CAST(sample_id AS BIGINT), sample_id, attempt;

CREATE VIEW tokens_merged AS
SELECT run, source, sample_id, position, min(step) AS step,
    latest(token_id, t_ns, seq) AS token_id,
    latest(text, t_ns, seq) AS text,
    latest(attention_mask, t_ns, seq) AS attention_mask,
    latest(response_mask, t_ns, seq) AS response_mask,
    latest(loss_mask, t_ns, seq) AS loss_mask,
    latest(rollout_log_prob, t_ns, seq) AS rollout_log_prob,
    latest(old_log_prob, t_ns, seq) AS old_log_prob,
    latest(ref_log_prob, t_ns, seq) AS ref_log_prob,
    latest(new_log_prob, t_ns, seq) AS new_log_prob,
    latest(value, t_ns, seq) AS value,
    latest(reward, t_ns, seq) AS reward,
    latest(advantage, t_ns, seq) AS advantage,
    latest("return", t_ns, seq) AS "return",
    latest(ratio, t_ns, seq) AS ratio,
    latest(clipped, t_ns, seq) AS clipped,
    latest(entropy, t_ns, seq) AS entropy,
    latest(loss_share, t_ns, seq) AS loss_share,
    latest(kl, t_ns, seq) AS kl,
    latest(weight, t_ns, seq) AS weight
FROM tokens GROUP BY run, source, sample_id, position
ORDER BY step, TRY_CAST(sample_id AS BIGINT), sample_id, position;

-- ---------------------------------------------------------------------------------------------------------- balance

-- What each rank had to do in each stage: its time, and the samples where ranks share them: who sampled, who trained. Collectives
-- that overlap count once.
CREATE MACRO balance_at(which_step) AS TABLE
WITH mine AS (
    SELECT DISTINCT run, source, process, rank, step, 'rollout' AS stage, sample_id FROM samples
    WHERE stage = 'rollout' AND response_length IS NOT NULL
    UNION ALL
    SELECT DISTINCT run, source, process, rank, step, coalesce(stage, 'update_actor'), sample_id FROM samples WHERE len(trained) > 0
    UNION ALL  -- a critic learns from every sample of its rank that has an advantage
    SELECT DISTINCT run, source, process, rank, step, 'update_critic', sample_id FROM samples
    WHERE source IN (SELECT source FROM spans WHERE stage = 'update_critic') AND advantage IS NOT NULL AND sample_id NOT IN (SELECT sample_id FROM samples WHERE dropped_reason IS NOT NULL)),
work AS (
    SELECT mine.run, mine.source, process, mine.rank, mine.step, mine.stage, count(*) AS samples,
        sum(prompt_length + response_length)::BIGINT AS tokens, TRY_CAST(sum((prompt_length + response_length)::DOUBLE ** 2) AS BIGINT) AS length_squares,
        max(prompt_length + response_length) AS longest
    FROM mine JOIN samples_merged AS lengths ON mine.run = lengths.run AND mine.source = lengths.source AND mine.sample_id = lengths.sample_id
    GROUP BY mine.run, mine.source, process, mine.rank, mine.step, mine.stage),
spent AS (
    SELECT run, source, process, any_value(rank) AS rank, step, stage,
        count(DISTINCT (epoch, mini_batch, micro_batch)) FILTER (micro_batch IS NOT NULL) AS micro_batches,
        sum(latency_ms) FILTER (span_kind = 'stage') / 1e3 AS seconds
    FROM spans_view WHERE stage IS NOT NULL AND source <> 'plan'
    GROUP BY run, source, process, step, stage HAVING bool_or(span_kind = 'stage')),
exchanged AS (
    SELECT run, source, process, step, stage,
        sum(end_ns - greatest(start_ns, covered_ns)) FILTER (coalesce(end_ns > covered_ns, true)) / 1e9 AS comm_seconds
    FROM (SELECT *, max(end_ns) OVER (PARTITION BY run, source, process, step, stage
        ORDER BY start_ns, id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS covered_ns FROM spans_view
        WHERE span_kind = 'comm' AND stage IS NOT NULL)
    GROUP BY run, source, process, step, stage)
SELECT run, source, step, stage, coalesce(work.rank, spent.rank) AS rank, samples, tokens, length_squares, longest,
    nullif(micro_batches, 0) AS micro_batches, seconds, coalesce(comm_seconds, 0) AS comm_seconds, waited_seconds, waited_for, process
FROM spent LEFT JOIN work USING (run, source, process, step, stage)
LEFT JOIN exchanged ON exchanged.run = spent.run AND exchanged.source = spent.source AND exchanged.process = spent.process
    AND exchanged.step IS NOT DISTINCT FROM spent.step AND exchanged.stage = spent.stage
LEFT JOIN waited_by_stage USING (run, source, process, step, stage)
LEFT JOIN flow_stages USING (stage)
WHERE which_step IS NULL OR step = which_step
ORDER BY step, position NULLS LAST, stage, rank;

-- ---------------------------------------------------------------------------------------------------------- waiting

-- What had begun and not ended when the run was heard last: what it is doing, or where it stood when it was stopped.
CREATE VIEW open_spans AS
SELECT run, source, process, rank, id, parent, name, span_kind, step, role, stage, phase, epoch, mini_batch, micro_batch, comm_type,
    "group", peer_ranks, bytes, started_ns, (heard_ns - started_ns) / 1e9 AS seconds
FROM spans_view JOIN (SELECT run, source, process, id, min(started_ns) AS started_ns, any_value(heard_ns) AS heard_ns FROM clocked
    GROUP BY run, source, process, id HAVING max(ended_ns) IS NULL) USING (run, source, process, id)
ORDER BY rank, started_ns, id;

-- Who waits for whom: one row for each collective that is open and each of its peers. `is_there`: the peer is in it too, or
-- has been; null where it recorded nothing. Where it is instead is its innermost open span; `peer_quiet_s`: since it got on.
CREATE VIEW waiting AS
WITH heard AS (
    SELECT run, source, rank, arg_max(process, started_ns) AS process, (max(heard_ns) - max(coalesce(ended_ns, started_ns))) / 1e9 AS quiet_s FROM clocked GROUP BY run, source, rank),
innermost AS (
    SELECT * FROM open_spans QUALIFY row_number() OVER (PARTITION BY run, source, rank ORDER BY started_ns DESC, id DESC) = 1),
pairs AS (
    SELECT open_spans.*, parties, nth, unnest(peers) AS peer FROM open_spans JOIN meetings USING (run, source, process, rank, id, comm_type)),
met AS (
    SELECT DISTINCT pairs.run, pairs.source, pairs.process, pairs.id, pairs.peer
    FROM pairs JOIN meetings ON meetings.run = pairs.run AND meetings.source = pairs.source AND meetings.rank = pairs.peer
        AND meetings.parties = pairs.parties AND meetings.nth = pairs.nth AND (contains(pairs.parties, '>') OR meetings.comm_type = pairs.comm_type))
SELECT pairs.run, pairs.source, pairs.process, pairs.rank, pairs.id, pairs.step, pairs.stage, pairs.phase, pairs.mini_batch,
    pairs.micro_batch, pairs.comm_type, pairs."group", pairs.peer_ranks, parties, nth, pairs.seconds, pairs.peer,
    CASE WHEN heard.quiet_s IS NOT NULL THEN met.id IS NOT NULL END AS is_there, own.quiet_s AS rank_quiet_s, heard.quiet_s AS peer_quiet_s,
    heard.process AS peer_process,
    innermost.name AS peer_name, innermost.step AS peer_step, innermost.stage AS peer_stage, innermost.phase AS peer_phase,
    innermost.mini_batch AS peer_mini_batch, innermost.micro_batch AS peer_micro_batch, innermost.comm_type AS peer_comm_type,
    innermost."group" AS peer_group, innermost.peer_ranks AS peer_peer_ranks, innermost.seconds AS peer_seconds
FROM pairs
LEFT JOIN met USING (run, source, process, id, peer)
LEFT JOIN heard ON heard.run = pairs.run AND heard.source = pairs.source AND heard.rank = pairs.peer
LEFT JOIN heard AS own ON own.run = pairs.run AND own.source = pairs.source AND own.rank = pairs.rank
LEFT JOIN innermost ON innermost.run = pairs.run AND innermost.source = pairs.source AND innermost.rank = pairs.peer
ORDER BY pairs.started_ns, pairs.rank, pairs.id, pairs.peer;

-- -------------------------------------------------------------------------------------------------------------- log

-- Tensors with the time of the innermost interval that is known to hold them (phase, else stage), and collectives.
CREATE VIEW log_rows AS
WITH intervals AS (
    SELECT run, source, process, step, stage, phase, epoch, mini_batch, micro_batch, max(latency_ms) AS latency_ms
    FROM spans_view WHERE stage IS NOT NULL AND span_kind IN ('stage', 'compute')
    GROUP BY run, source, process, step, stage, phase, epoch, mini_batch, micro_batch)
SELECT t.run, t.source, t.process, t.seq, t.t_ns, t.step, t.stage, t.rank, t.tensor_name, logical_shape, local_shape, dtype,
    numel, bytes, mask_ratio, coalesce(lifetime, flow_lifetime) AS lifetime, NULL::VARCHAR AS comm_type,
    coalesce(i.latency_ms, whole.latency_ms) AS latency_ms, coalesce(owner, flow_owner) AS owner
FROM accesses AS t
LEFT JOIN intervals AS i ON t.run = i.run AND t.source = i.source AND t.process = i.process
    AND t.stage = i.stage AND t.step IS NOT DISTINCT FROM i.step AND t.phase IS NOT DISTINCT FROM i.phase
    AND t.epoch IS NOT DISTINCT FROM i.epoch AND t.mini_batch IS NOT DISTINCT FROM i.mini_batch
    AND t.micro_batch IS NOT DISTINCT FROM i.micro_batch
LEFT JOIN intervals AS whole ON t.run = whole.run AND t.source = whole.source AND t.process = whole.process
    AND t.stage = whole.stage AND t.step IS NOT DISTINCT FROM whole.step AND whole.phase IS NULL AND whole.epoch IS NULL
    AND whole.mini_batch IS NULL AND whole.micro_batch IS NULL
LEFT JOIN flow_tensors ON t.tensor_name = flow_tensors.tensor_name
UNION ALL
SELECT run, source, process, id, start_ns, step, stage, rank, 'comm_buffer', NULL, NULL, NULL, NULL, bytes, NULL, NULL,
    comm_type, latency_ms, NULL
FROM spans_view WHERE span_kind = 'comm';

CREATE VIEW log AS
SELECT stage, rank, tensor_name, logical_shape, local_shape, dtype, numel, bytes, mask_ratio, lifetime, comm_type,
    latency_ms, owner
FROM log_rows ORDER BY process, t_ns, seq;

-- --------------------------------------------------------------------------------------------------------- findings

-- What checks said, and what the shapes say by themselves: a mask that cannot cover its tensor.
CREATE VIEW findings_view AS
WITH found AS (
    SELECT run, source, step, stage, id, scope, "order", position, verdict, severity, message, evidence, needs, fix,
        next_step, confidence FROM findings
    UNION ALL
    SELECT run, source, NULL, stage, 'mask_shape', CASE source WHEN 'plan' THEN 'plan' ELSE 'run' END, 'shape_mismatch', 3, 'fail', 'error',
        concat(tensor_name, ' ', coalesce(local_shape, logical_shape)::VARCHAR, ' in ', place(stage, phase), ': its mask ', mask, ' ', mask_shape::VARCHAR, ' does not broadcast to it'),
        NULL, NULL, NULL, 'compare the mask and the tensor where they are made', 1.0
    FROM shapes WHERE mask_fits = false)
SELECT * FROM found
ORDER BY list_position(['fail', 'warn', 'pass', 'skipped'], verdict), "order", position, id, step;
