"""Send requests to a server from a separate process. Prints a line when it begins, and the results as one JSON object.

    python -m benchmarks.serving.open_loop PORT SECONDS closed CLIENTS
    python -m benchmarks.serving.open_loop PORT SECONDS open REQUESTS_PER_S

Closed: CLIENTS clients, each of which sends its next request when it is answered. Open: requests are sent at random
times at this mean rate, independent of earlier answers. Imports only the standard library and `served`.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import random
import sys
import time

from benchmarks.serving.served import Connection, posted

PROMPTS, PROMPT_TOKENS = 4, 400
BODIES = 1024
REFUSED_PAUSE_SECONDS = 0.2
# Seconds to wait for the answers to the last requests.
DRAIN_SECONDS = 60.0


class Load:
    """A load of random requests on the server at `port` for `seconds`."""

    def __init__(self, port: int, seconds: float) -> None:
        self.port, self.seconds = port, seconds
        self.random = random.Random(0)
        # Computed before, to minimise the work between two requests.
        self.requests = [self.request() for _ in range(BODIES)]
        self.free: list[Connection] = []
        self.seconds_by_status: dict[int, list[float]] = collections.defaultdict(list)
        self.late: list[float] = []
        self.errors: collections.Counter[str] = collections.Counter()
        self.answered_in_time = 0
        self.end = 0.0

    def request(self) -> bytes:
        """Return the HTTP bytes of a random request."""
        # Both models of the benchmarks have these token ids.
        prompts = [[self.random.randrange(5, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
        return posted("/v1/completions", {"prompt": prompts, "max_tokens": 1})

    async def ask(self, data: bytes) -> int:
        """Send one request, and return the status; 0 if there is no answer."""
        connection = self.free.pop() if self.free else Connection(self.port)
        began = time.monotonic()
        try:
            status, _ = await connection.ask(data)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.errors[type(error).__name__] += 1
            connection.close()
            return 0
        now = time.monotonic()
        self.seconds_by_status[status].append(now - began)
        self.answered_in_time += status == 200 and now <= self.end
        self.free.append(connection)
        return status

    async def closed(self, clients: int) -> None:
        """Run `clients` clients, each of which sends its next request when it is answered."""

        async def client() -> None:
            while time.monotonic() < self.end:
                if await self.ask(self.random.choice(self.requests)) != 200:
                    await asyncio.sleep(REFUSED_PAUSE_SECONDS)

        await asyncio.gather(*(client() for _ in range(clients)))

    async def open(self, rate: float) -> None:
        """Send requests at random times with a mean of `rate` per second."""
        tasks: set[asyncio.Task[int]] = set()
        due = time.monotonic()
        while due < self.end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.late.append(time.monotonic() - due)
            task = asyncio.create_task(self.ask(self.random.choice(self.requests)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += self.random.expovariate(rate)
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=DRAIN_SECONDS)
            self.errors["no answer"] += len(pending)
            for task in pending:
                task.cancel()

    async def run(self, kind: str, number: float) -> None:
        """Run the load of `kind`, and print its results."""
        gc.freeze()
        print("begins", flush=True)
        self.end = time.monotonic() + self.seconds
        await (self.closed(int(number)) if kind == "closed" else self.open(number))
        for connection in self.free:
            connection.close()
        result = {
            "seconds": self.seconds,
            "answered_per_s": self.answered_in_time / self.seconds,
            "seconds_by_status": self.seconds_by_status,
            "late": self.late,
            "errors": self.errors,
            "cores": time.process_time() / self.seconds,
        }
        print(json.dumps(result))


if __name__ == "__main__":
    gc.disable()  # its pauses would count as the server's
    asyncio.run(Load(int(sys.argv[1]), float(sys.argv[2])).run(sys.argv[3], float(sys.argv[4])))
