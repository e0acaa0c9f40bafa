"""The source of a user's file: a game that works, and environments and tools that do not."""

GAME = '''
import os, random, sys, threading, time

class Guess:
    def __init__(self):
        self.turns = 0

    def reset(self, row):
        if row.get("raises"):
            raise KeyError("no such row")
        if row.get("forks"):
            os.fork()
        if row.get("hangs"):
            time.sleep(1000)
        if row.get("odd"):
            return 7
        self.secret, self.done, self.drawn = row["secret"], False, random.random()
        return f"Guess up to {row['most']}."

    def guess(self, number: int, sure: bool = False) -> str:
        """Guess the
        number.

        More words.

        Args:
            number: your guess,
                a whole one
        """
        self.turns += 1
        self.done = int(number == self.secret)  # what is true in Python's sense is enough
        print("asked for", number)
        return "right" if self.done else ["wrong", number]

    def luck(self) -> float:
        time.sleep(0.1)  # a fork that goes on is heard meanwhile
        return self.drawn

    def leave(self):
        os._exit(3)

    def hang(self):
        time.sleep(1000)

    def stop(self):
        sys.exit("enough")

    def eat(self):
        return len(bytearray(3 * 10**9))

    def leave_a_child(self):
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
        return pid

    def fork(self, ends: bool):
        if os.fork() == 0 and ends:
            sys.exit()
        return "forked"

    def nothing(self) -> None:
        pass

    def much(self):
        return "x" * 10**6

    def scribble(self):
        for entry in os.scandir("/proc/self/fd"):
            if os.path.islink(entry) and "socket" in os.readlink(entry):
                os.write(int(entry.name), b"1\\n")

    def list_much(self):
        return ["x"] * 10**6

    def leave_a_program(self):
        os.system("sleep 1000 &")
        os._exit(4)

    def leave_later(self):
        threading.Timer(0.05, os._exit, [5]).start()

    def odd(self):
        return "a\\ud800b"

    def reply(self, text):
        return {"go on": "Go on.", "list": [{"role": "user", "content": "x"}]}.get(text)

    def turn_reward(self):
        return 1e300 if self.turns > 2 else self.turns / 2

    def reward(self):
        return {"score": 1.0 if self.done else "bad", "turns": self.turns}

    def _private(self): ...

def order():
    return " ".join({*"abcdefgh"})

def emojis():
    return "\U0001f600" * 10**6

def slow(seconds: float = 0.05):
    time.sleep(seconds)
    return {"slept": seconds}

def dies(code: int):
    os._exit(code)
'''
