"""Compress and decompress payloads in threads, to keep the event loop free.

An array that is sent to several devices is compressed once. The compressed bytes stay in memory
while a message with the array waits to be sent.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

from cleave import coding
from cleave.protocol.codec import payload_bytes
from cleave.protocol.limits import CODED_LEAST_BYTES
from cleave.protocol.messages import Put, PutCoded, Result, ResultCoded


class SharedArray:
    """An array sent in `put` messages. The first call to `coded` compresses the array."""

    def __init__(self, put: Put, pool: ThreadPoolExecutor) -> None:
        self.payload = put.payload
        self._put = put
        self._pool = pool
        self._coding: asyncio.Task[bytes | None] | None = None

    async def coded(self) -> bytes | None:
        """Return the compressed array; None if the array should be sent uncompressed."""
        if self._coding is None:
            compressed = asyncio.to_thread(coding.coded_payload, self._put, self._pool.map)
            self._coding = asyncio.create_task(compressed)
        return await asyncio.shield(self._coding)  # cancelling one sender must not cancel this task


class Coder:
    """Compresses and decompresses payloads for all sessions, in background threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, "cleave-coding")
        self._shared: WeakValueDictionary[int, SharedArray] = WeakValueDictionary()

    def shared(self, put: Put) -> SharedArray | None:
        """Return the `SharedArray` of a payload; None if the payload is too small to compress."""
        if payload_bytes(put.payload) < CODED_LEAST_BYTES:
            return None
        array = self._shared.get(id(put.payload))
        if array is None:  # SharedArray keeps the payload alive, so the payload's id stays unique
            array = self._shared[id(put.payload)] = SharedArray(put, self._pool)
        return array

    async def put(self, put: Put, array: SharedArray) -> Put | PutCoded:
        """Return a message with the compressed array, or `put` to send the array uncompressed."""
        found = await array.coded()
        return put if found is None else coding.with_coded(put, found)

    async def result(self, message: ResultCoded) -> Result:
        """Decompress a device's `result_coded` message. Raise ProtocolError if it is invalid."""
        if payload_bytes(message.payload) < CODED_LEAST_BYTES:
            return coding.result_of(message)
        return await asyncio.to_thread(coding.result_of, message, self._pool.map)

    def close(self) -> None:
        """Stop the compression threads and cancel queued compressions."""
        self._pool.shutdown(wait=False, cancel_futures=True)
