import asyncio


class RewardLoopWorker:
    async def compute_score_batch(self, data):
        return await asyncio.gather(*(self.compute_score(one) for one in data))

    async def compute_score(self, data):
        await asyncio.sleep(0)
        return {"reward_score": float(data)}
