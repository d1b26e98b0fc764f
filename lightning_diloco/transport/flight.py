"""The transport between machines: Arrow Flight over gRPC.

1. A connection is three: control, polls, bulk. A waiting poll never delays a send, and bulk delays neither.
2. Control is `do_action`, JSON in and out. Bulk is `do_put` and `do_get`; see `frames`.
3. Every call has a deadline and every connection keepalive: against a peer that froze, keepalive frees an upload (its
   deadline does not) and the deadline frees a download (keepalive does not). So a call ends by its deadline, an upload
   over a frozen line by twice keepalive_s if that is later.
4. There is TLS, on loopback, too: the syncer shows the pinned certificate, the learner one that follows from the token.
   Every call carries the token.
"""

from lightning_diloco.transport.flight_client import FlightConnection
from lightning_diloco.transport.flight_server import FlightServer

__all__ = ["FlightConnection", "FlightServer"]
