"""An environment, and a rollout function that does what it does: the sources of a user's file."""

from __future__ import annotations

ENVIRONMENT = """
class Talk:
    def reset(self, row):
        if row["uid"] == 3:
            raise ValueError("nothing to say")
        self.sizes, self.uid = [], row["uid"]
        return f"go {row['uid']}" if row["uid"] % 2 else None

    def note(self, size: int) -> str:
        self.sizes.append(size)
        if self.uid == 5:
            return "no token: \u00e9"
        return "x" * (size % 5)

    def reply(self, text):
        self.sizes.append(len(text))
        if self.uid == 5:
            return "no token: \u00e9"
        return None if len(self.sizes) > self.uid % 4 else f"ok {len(text)}"

    def turn_reward(self):
        return self.sizes[-1] / 2

    def reward(self):
        return {"score": sum(self.sizes), "turns": len(self.sizes)}
"""
FUNCTION = """
TOOL = {"type": "function", "function": {"name": "note"}}


async def lead(engine, row, sampling):
    uid = row["uid"]
    first = [{"role": "user", "content": f"go {uid}"}] if uid % 2 else []
    one = await engine.prompt(row["prompt"] + first, tools=[TOOL])
    begin, turns = len(one.token_ids), 0
    while True:
        one = await engine.generate(one, max_tokens=60 - (len(one.token_ids) - begin))
        turns += 1
        size = len(one.text)
        if not one.stopped or turns == sampling.max_turns:
            return one
        told = f"ok {size}"
        if one.calls:
            assert one.calls == [{"name": "note", "arguments": {"size": size}}] and not one.content
            told = [{"role": "tool", "name": "note", "content": "x" * (size % 5)}]
        elif turns > uid % 4:
            return one
        longer = await engine.tell(one, told)
        if len(longer.token_ids) - begin >= 60:
            return one
        one = longer
"""
