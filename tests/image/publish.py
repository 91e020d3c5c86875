"""Forward a port of this machine into a network namespace, like an engine's proxy. Standard library only.

python -I publish.py ADDRESS PORT NAMESPACE TARGET TARGET_PORT
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import sys

_CLONE_NEWNET = 0x40000000


async def serve(listening: socket.socket, there: str, port: int) -> None:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(there, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pour(reader, far_writer), pour(far_reader, writer))

    server = await asyncio.start_server(relay, sock=listening)
    print("ready", flush=True)
    await server.serve_forever()


async def pour(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65_536):
            target.write(data)
            await target.drain()
    except OSError:
        pass
    finally:
        target.close()


def main(address: str, port: str, namespace: str, there: str, there_port: str) -> None:
    # Made here, served there: a socket belongs to where it was made, for good.
    listening = socket.create_server((address, int(port)))
    if ctypes.CDLL(None, use_errno=True).setns(os.open(namespace, os.O_RDONLY), _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    asyncio.run(serve(listening, there, int(there_port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
