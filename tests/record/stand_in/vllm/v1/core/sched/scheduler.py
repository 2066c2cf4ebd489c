"""A scheduler with the names of vLLM's that are watched, and a small cache; it keeps books of its own, `told`, to compare with."""

import time
from types import SimpleNamespace

BLOCK = 4  # tokens


class Request:
    def __init__(self, request_id, prompt_tokens, response_tokens, cached=0):
        self.request_id, self.num_prompt_tokens, self.cached = request_id, prompt_tokens, cached
        self.wanted, self.num_output_tokens, self.num_computed_tokens = response_tokens, 0, 0
        self.arrival_time, self.reason = time.time(), None

    def get_finished_reason(self):
        return self.reason

    def blocks(self):
        return -(-(self.num_prompt_tokens + self.num_output_tokens) // BLOCK)


class Pool:
    def __init__(self, blocks):
        self.num_gpu_blocks, self.held = blocks + 1, {}

    def get_num_free_blocks(self):
        return self.num_gpu_blocks - 1 - sum(self.held.values())


class Scheduler:
    def __init__(self, blocks=10, slots=3):
        self.kv_cache_manager = SimpleNamespace(block_pool=Pool(blocks))
        self.requests, self.running, self.waiting, self.slots, self.told = {}, [], [], slots, []

    def get_request_counts(self):
        return len(self.running), len(self.waiting)

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self, throttle_prefills=False):
        pool, tokens, new, resumed = self.kv_cache_manager.block_pool, {}, [], set()
        cached = SimpleNamespace(req_ids=[], num_output_tokens=[], resumed_req_ids=resumed)
        for request in list(self.running):
            while (
                request in self.running
                and pool.get_num_free_blocks() < request.blocks() - pool.held[request.request_id]
            ):
                self._preempt_request(self.running[-1], time.monotonic())
                tokens.pop(self.waiting[0].request_id, None)
            if request in self.running:
                self._give(request, tokens, 1)
                cached.req_ids.append(request.request_id)
                cached.num_output_tokens.append(request.num_output_tokens)
        while (
            self.waiting and len(self.running) < self.slots and pool.get_num_free_blocks() >= self.waiting[0].blocks()
        ):
            request = self.waiting.pop(0)
            self.running.append(request)
            if request.num_output_tokens:
                resumed.add(request.request_id)
                cached.req_ids.append(request.request_id)
                cached.num_output_tokens.append(request.num_output_tokens)
            else:
                request.num_computed_tokens = request.cached
                new.append(SimpleNamespace(req_id=request.request_id, num_computed_tokens=request.cached))
            left = request.num_prompt_tokens + request.num_output_tokens - request.num_computed_tokens
            self._give(request, tokens, left)
        prefill = sum(tokens[one.req_id] for one in new) + sum(tokens[name] for name in resumed)
        self.told.append(
            (len(self.running), len(self.waiting), sum(pool.held.values()), prefill, sum(tokens.values()) - prefill)
        )
        return SimpleNamespace(
            scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
        )  # fmt: skip

    def _give(self, request, tokens, count):
        tokens[request.request_id] = count
        request.num_computed_tokens += count
        self.kv_cache_manager.block_pool.held[request.request_id] = request.blocks()

    def update_from_output(self, output):
        for name in output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is not None and request in self.running:
                request.num_output_tokens += 1
                if request.num_output_tokens >= request.wanted:
                    self._end(request, "length" if request.wanted >= 9 else "stop")

    def finish_requests(self, names):
        for name in names:
            self._end(self.requests[name], "abort")

    def _end(self, request, reason):
        request.reason = reason
        (self.running if request in self.running else self.waiting).remove(request)
        self._free_request(request)

    def _free_request(self, request, delay_free_blocks=False):
        self.kv_cache_manager.block_pool.held.pop(request.request_id, None)
        del self.requests[request.request_id]

    def _preempt_request(self, request, timestamp):
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.kv_cache_manager.block_pool.held.pop(request.request_id)
        request.num_computed_tokens = 0
