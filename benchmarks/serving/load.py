"""A bounded load: load.py URL CLIENTS SECONDS OUT, with the body of a request on standard input.

Each client has one connection, and sends its next request when it has the answer to the last one.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import uvloop


async def client(host: str, port: int, request: bytes, until: float, seconds: list[float], failed: list[int]) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    while (began := time.perf_counter()) < until:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        if b"content-length" in fields:
            await reader.readexactly(int(fields[b"content-length"]))
        else:
            await reader.readuntil(b"\r\n0\r\n\r\n")  # in chunks
        if head.split(b" ", 2)[1] == b"200":
            seconds.append(time.perf_counter() - began)
        else:
            failed.append(1)
    writer.close()


async def main(url: str, clients: int, duration: float) -> dict[str, float]:
    parts, body = urlsplit(url), sys.stdin.buffer.read()
    host, port = str(parts.hostname), int(parts.port or 80)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\nContent-Length: "
    request, failed = head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body, list[int]()
    for time_s in (0.5, duration):  # the first is for warming up
        seconds: list[float] = []
        began = time.perf_counter()
        await asyncio.gather(*(client(host, port, request, began + time_s, seconds, failed) for _ in range(clients)))
        took = time.perf_counter() - began
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        "per_s": len(ordered) / took,
        "p50_ms": 1000 * ordered[last // 2],
        "p99_ms": 1000 * ordered[int(last * 0.99)],
        "failed": len(failed),
    }


if __name__ == "__main__":
    address, count, duration_s, out = sys.argv[1:]
    Path(out).write_text(json.dumps(uvloop.run(main(address, int(count), float(duration_s)))))
