"""Compress and decompress payloads in threads, so that the server's event loop is not blocked.

An array sent to several devices is compressed once. Its compressed form is kept only while a
message that needs it waits to be sent.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

from cleave.coding import coded
from cleave.protocol.codec import payload_bytes
from cleave.protocol.limits import CODED_LEAST_BYTES
from cleave.protocol.messages import Put, PutCoded, Result, ResultCoded


class SharedArray:
    """An array to send, and its compressed form once a receiver needs it.

    Args:
        put: a message that sends the array.
        pool: threads that compress.
    """

    def __init__(self, put: Put, pool: ThreadPoolExecutor) -> None:
        self.payload = put.payload
        self._put = put
        self._pool = pool
        self._coding: asyncio.Task[bytes | None] | None = None

    async def coded(self) -> bytes | None:
        """Return the compressed form; None if the array should be sent uncompressed."""
        if self._coding is None:
            coding = asyncio.to_thread(coded.coded_payload, self._put, self._pool.map)
            self._coding = asyncio.create_task(coding)
        return await asyncio.shield(self._coding)  # other senders may wait for the same task


class Coder:
    """Compresses and decompresses for all sessions of a server. Call it in the server's loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, "cleave-coding")
        self._shared: WeakValueDictionary[int, SharedArray] = WeakValueDictionary()

    def shared(self, put: Put) -> SharedArray | None:
        """Return the compressor that all receivers of an array share; None for a small array.

        Messages with the same payload object carry the same array.
        """
        if payload_bytes(put.payload) < CODED_LEAST_BYTES:
            return None
        array = self._shared.get(id(put.payload))
        if array is None:  # SharedArray keeps the payload alive, so its id stays unique
            array = self._shared[id(put.payload)] = SharedArray(put, self._pool)
        return array

    async def put(self, put: Put, array: SharedArray) -> Put | PutCoded:
        """Return the message that sends an array, compressed if that is shorter."""
        found = await array.coded()
        return put if found is None else coded.with_coded(put, found)

    async def result(self, message: ResultCoded) -> Result:
        """Decompress a device's message into a `result`.

        Raises:
            ProtocolError: when the payload is invalid.
        """
        if payload_bytes(message.payload) < CODED_LEAST_BYTES:
            return coded.result_of(message)
        return await asyncio.to_thread(coded.result_of, message, self._pool.map)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
