"""The source of users' files: code that misbehaves, and a game that works."""

# A reward function, an environment and a rollout function, which all run one of `WAYS`.
WAYS = """
import os, re, signal, subprocess, sys, threading, time

print("imported")

def is_fine():
    pass

def raises():
    raise KeyError("lost")

def exits():
    sys.exit("no score today")

def forks():
    os.fork()
    time.sleep(0.1)  # a fork that goes on is heard meanwhile

def fork_exits():
    if os.fork() == 0:
        sys.exit()
    time.sleep(0.1)

def loops():
    while True:
        pass

def sleeps():
    time.sleep(1000)

def hangs_in_c():
    re.match("(a+)+$", "a" * 64 + "b")  # holds the interpreter's lock throughout

def ignores_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    loops()

def leaves():
    os._exit(3)

def leaves_a_program():
    os.system("sleep 1000 &")
    os._exit(4)

def crashes():
    os.abort()

def is_killed():
    os.kill(os.getpid(), 9)

def hangs_up():
    os.closerange(3, 100)
    time.sleep(1000)

def takes_memory():
    bytearray(600 * 10**6)

def a_child_takes_memory():
    program = "bytearray(600 * 10**6)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return "refused" if done.returncode and "MemoryError" in done.stderr else "fine"

def starts_threads():
    for _ in range(1000):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

def reads_its_place():
    return open("/proc/self/oom_score_adj").read().strip()

def has_a_child(file):
    pid = subprocess.Popen(["sleep", "1000"]).pid
    print("child", pid, flush=True)
    with open(file, "w") as written:
        written.write(str(pid))

def has_a_child_and_hangs(file):
    has_a_child(file)
    time.sleep(1000)

def has_a_child_and_leaves(file):
    has_a_child(file)
    os._exit(3)

def run(way):
    name, *arguments = way.split()
    return globals()[name](*arguments) or "fine"

def score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0, "pred": run(solution_str)}

class Environment:
    def reset(self, row):
        return "Begin."

    def misbehave(self, way: str) -> str:
        return run(way)

async def rollout(engine, row, sampling):
    one = await engine.generate([1])
    one.role = run(row["way"])
    return one
"""

GAME = '''
import os, random, threading, time

class Guess:
    def __init__(self):
        self.turns = 0

    def reset(self, row):
        if row.get("raises"):
            raise KeyError("no such row")
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
        return self.drawn

    def hang(self):
        time.sleep(1000)

    def leave_a_child(self):
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
        return pid

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
