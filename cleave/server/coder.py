"""Coding and decoding of payloads in threads, so that the server's loop stays free.

An array that several devices are sent is coded once. Its coded form is kept as long as a message
that needs it waits to be sent, and no longer.
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
    """An array that is to be sent, and its coded form once somebody needs it.

    Args:
        put: a message that sends it.
        pool: the threads that code.
    """

    def __init__(self, put: Put, pool: ThreadPoolExecutor) -> None:
        self.payload = put.payload
        self._put = put
        self._pool = pool
        self._coding: asyncio.Task[bytes | None] | None = None

    async def coded(self) -> bytes | None:
        """Return the coded form; None if the array is to travel as it is."""
        if self._coding is None:
            coding = asyncio.to_thread(coded.coded_payload, self._put, self._pool.map)
            self._coding = asyncio.create_task(coding)
        return await asyncio.shield(self._coding)  # others may wait for it as well


class Coder:
    """What codes and decodes for all sessions of a server. Call it in the server's loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, "cleave-coding")
        self._shared: WeakValueDictionary[int, SharedArray] = WeakValueDictionary()

    def shared(self, put: Put) -> SharedArray | None:
        """Return what codes an array, for all that are sent it; None if that is not worth it.

        Messages with the very same payload are about the same array.
        """
        if payload_bytes(put.payload) < CODED_LEAST_BYTES:
            return None
        array = self._shared.get(id(put.payload))
        if array is None:  # it holds the payload, so that no other one gets the same id
            array = self._shared[id(put.payload)] = SharedArray(put, self._pool)
        return array

    async def put(self, put: Put, array: SharedArray) -> Put | PutCoded:
        """Return the message that sends an array, coded where that is shorter."""
        found = await array.coded()
        return put if found is None else coded.with_coded(put, found)

    async def result(self, message: ResultCoded) -> Result:
        """Return the `result` that a message of a device stands for.

        Raises:
            ProtocolError: when its payload is not what it should be.
        """
        if payload_bytes(message.payload) < CODED_LEAST_BYTES:
            return coded.result_of(message)
        return await asyncio.to_thread(coded.result_of, message, self._pool.map)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
