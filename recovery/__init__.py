"""Live recovery for DiLoCo workers. ``recovery.worker`` is what a training loop uses."""

import os

# gRPC's core writes a line for every broken stream, which here is an event with a name; it reads this when it is first
# imported. Whoever wants its lines sets the variable.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
