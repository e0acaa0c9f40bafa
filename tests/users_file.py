"""A file of a user's, with reward functions, environments and a rollout function."""

from __future__ import annotations

REWARDS = """
def score(data_source, solution_str, ground_truth, extra_info):
    return 1.0

def old(response):
    return 1.0

class Asks:
    def reply(self, text):
        return "1+1"

class Adds(Asks):
    def add(self, a: int, b: int) -> int:
        return a + b

class Pays(Asks):
    def reward(self):
        return 1.0

class Untyped(Asks):
    def add(self, a, b):
        return a + b

async def leads(engine, row, sampling):
    return await engine.generate([1])
"""
