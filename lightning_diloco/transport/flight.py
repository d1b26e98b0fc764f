"""The transport between machines: Arrow Flight over gRPC.

1. Each running call has its own TCP connection. A waiting poll does not delay a send, and bulk does not delay either of
   them.
2. Control calls are `do_action` with JSON in both directions. Bulk calls are `do_put` and `do_get`; see `frames`.
3. Each call has a deadline, and each connection uses keepalive. If a peer freezes, keepalive ends an upload (the
   deadline does not), and the deadline ends a download (keepalive does not). A call therefore ends at its deadline.
   Only an upload to a frozen peer may end later, after twice keepalive_s.
4. All connections use TLS, also on loopback. The syncer presents the pinned certificate. The learner presents a
   certificate made from the token. Each call carries the token.
"""

from lightning_diloco.transport.flight_client import FlightConnection
from lightning_diloco.transport.flight_server import FlightServer

__all__ = ["FlightConnection", "FlightServer"]
