"""A worker of `make bench-peers` on the asyncio Lock of redis-py. See bench/peers/README.md."""

import asyncio
import json
import os
import sys
import threading
import time

import redis
from redis.asyncio import Redis

LEASE = 30

_, library, url, interval = sys.argv
# By default, a pool has 100 connections, and a task that needs another one fails.
client = Redis.from_url(url, max_connections=128)


def handle(name):
    return client.lock(name, timeout=LEASE, sleep=int(interval) / 1000)


async def pairs(name, own_names, tasks, ms):
    """Acquires and releases in many tasks, each with a lock of its own or all with the same. Returns the number of
    pairs of each task."""
    end = time.monotonic() + ms / 1000

    async def work(number):
        lock = handle(f"{name}{number}" if own_names else name)
        count = 0
        while time.monotonic() < end:
            await lock.acquire()
            await lock.release()
            count += 1
        return count

    return await asyncio.gather(*map(work, range(tasks)))


def write(line):
    print(json.dumps(line), flush=True)


def read(lines, loop):
    """Reads standard input. Ends the process with it, also while a task waits for a lock."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(lines.put_nowait, line)
    os._exit(0)


async def main():
    write({"ready": f"{library} {redis.__version__}"})
    held = None
    lines = asyncio.Queue()
    threading.Thread(target=read, args=[lines, asyncio.get_running_loop()], daemon=True).start()
    while True:
        line = await lines.get()
        id, _worker, command, _kind, name, *args = line.split()
        # This is the machine's monotonic clock, which all processes share.
        started = time.monotonic_ns()
        value = True
        if command == "lock":
            held = handle(name)
            await held.acquire()
        elif command == "unlock":
            await held.release()
        elif command in ("pairs", "contend"):
            value = await pairs(name, command == "pairs", int(args[0]), int(args[1]))
        else:
            sys.exit(f"unknown command {line}")
        write({"id": int(id), "started": started, "ended": time.monotonic_ns(), "ok": value})


asyncio.run(main())
