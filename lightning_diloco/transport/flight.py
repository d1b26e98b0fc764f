"""The transport between machines: Arrow Flight over gRPC.

1. Each running call has a TCP connection of its own. A waiting poll never delays a send, and bulk delays neither.
2. Control calls are `do_action` with JSON in both directions. Bulk calls are `do_put` and `do_get`; see `frames`.
3. Each call has a deadline, and each connection uses keepalive. If a peer freezes, keepalive ends an upload (the
   deadline does not), and the deadline ends a download (keepalive does not). So a call ends at its deadline; an upload
   to a frozen peer may end after twice keepalive_s, if that is later.
4. TLS is always used, also on loopback. The syncer presents the pinned certificate, the learner one made from the
   token. Each call carries the token.
"""

from lightning_diloco.transport.flight_client import FlightConnection
from lightning_diloco.transport.flight_server import FlightServer

__all__ = ["FlightConnection", "FlightServer"]
