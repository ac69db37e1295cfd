"""The two ends of a session as state machines, without a socket between them, once they have greeted each other."""

from __future__ import annotations

from kvfs.protocol.messages import Hello, HelloAnswer
from kvfs.protocol.state_machine import Connection, ReceivedAnswer, ReceivedRequest, Side

HELLO_ANSWER = HelloAnswer(bytes(16), True, {"directory": "/d"})


def greeted() -> tuple[Connection, Connection]:
    client, server = Connection(Side.CLIENT), Connection(Side.SERVER)
    server.receive_data(client.send_request(Hello("test", 1)))
    assert isinstance(server.next_event(), ReceivedRequest)
    client.receive_data(server.send_answer(HELLO_ANSWER))
    received = client.next_event()
    assert isinstance(received, ReceivedAnswer)
    assert received.answer == HELLO_ANSWER
    return client, server
